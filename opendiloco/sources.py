"""Where settings come from: the command line, the environment, a TOML file."""

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from opendiloco.command import DEBUG_ENV
from opendiloco.errors import ConfigError

ENV_PREFIX = "OPENDILOCO_"
CONFIG_ENV = f"{ENV_PREFIX}CONFIG"

# Similarities of names, as difflib measures them.
_SAME = 1.0
_CLOSE = 0.8  # in the environment, where strange names are normal, this is a typo
_SIMILAR = 0.6


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        key: Its name, groups first: ``diloco.inner_steps``.
        info: Its type, default and description.
        group: Title of its group.
    """

    key: str
    info: FieldInfo
    group: str

    @property
    def option(self) -> str:
        """Its name on the command line."""
        return "--" + self.key.replace("_", "-")

    @property
    def env(self) -> str:
        """Its name in the environment."""
        return ENV_PREFIX + self.key.upper().replace(".", "__")

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return get_origin(self.info.annotation) is list


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody gave.

    Attributes:
        value: As it was given, not checked; text, a list of texts, or what TOML and switches give.
        name: What to call the setting in a message: an option, a variable, a key of a file.
        source: Where it was given, in words.
    """

    value: object
    name: str
    source: str


def settings_of(
    cls: type[BaseModel], prefix: str = "", *, group: str = "Settings"
) -> Iterator[Setting]:
    """Yield the settings of a command, those of its groups included, in the order of the class.

    Args:
        cls: The command's settings, or a group of them.
        prefix: The group's name with a dot behind it.
        group: The group's title.
    """
    for name, info in cls.model_fields.items():
        nested = info.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            title = _summary(nested) or name
            yield from settings_of(nested, f"{prefix}{name}.", group=title.rstrip("."))
        else:
            yield Setting(prefix + name, info, group)


def _summary(cls: type[BaseModel]) -> str:
    return cleandoc(cls.__doc__ or "").partition("\n")[0]


# ---- the command line


def parse_arguments(
    cls: type[BaseModel], settings: Mapping[str, Setting], argv: Sequence[str], *, prog: str
) -> dict[str, object]:
    """Return what the command line gives: text, lists of text, and booleans.

    Args:
        cls: The command's settings.
        settings: All of them by key.
        argv: The command line.
        prog: The command's name.

    Returns:
        The values by key; ``config`` and ``print_config`` among them.

    Raises:
        ConfigError: If it cannot be understood.
        SystemExit: With code 0, after ``--help``.
    """
    parser = _parser(cls, settings, prog=prog)
    try:
        arguments, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}; see {prog} --help") from None
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise ConfigError(f"unexpected argument {unknown[0]!r}; see {prog} --help")
        options = ["--help", "--config", "--print-config"]
        options += [setting.option for setting in settings.values()]
        hint = _suggestion(name, options) or f"; see {prog} --help"
        raise ConfigError(f"no such option {name}{hint}")
    return vars(arguments)


def _parser(
    cls: type[BaseModel], settings: Mapping[str, Setting], *, prog: str
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE] [--SETTING VALUE ...]",
        description=f"{_summary(cls)} "
        "A setting is taken from the command line, else from the environment, else from the "
        "file of --config, else it has its default.".replace("%", "%%"),
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    general = parser.add_argument_group("General")
    general.add_argument("--help", "-h", action="help", help="show this and exit")
    general.add_argument("--config", metavar="FILE", help=f"TOML file with settings [{CONFIG_ENV}]")
    general.add_argument(
        "--print-config",
        action="store_true",
        help="show all settings and where each comes from, and exit",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in settings.values():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        _add_option(groups[setting.group], setting)
    return parser


def _add_option(group: argparse._ArgumentGroup, setting: Setting) -> None:
    default = _plain(setting.info.get_default(call_default_factory=True))
    default = "required" if setting.info.is_required() else f"default: {default}"
    text = f"{setting.info.description} ({default}) [{setting.env}]"
    text = text.replace("%", "%%")
    if setting.info.annotation is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(setting.option, dest=setting.key, action=action, help=text)
        return
    group.add_argument(
        setting.option,
        dest=setting.key,
        action="extend" if setting.is_list else "store",
        nargs="*" if setting.is_list else None,
        metavar=_metavar(setting.info.annotation),
        help=text,
    )


def _metavar(annotation: object) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    kinds = set(_kinds(annotation))
    for kind, name in ((int, "N"), (float, "X"), (Path, "PATH")):
        if kind in kinds:
            return name
    return "VALUE"


def _kinds(annotation: object) -> Iterator[object]:
    yield annotation
    for part in get_args(annotation):
        if isinstance(part, type) or get_args(part):
            yield from _kinds(part)


def _plain(default: object) -> str:
    if isinstance(default, list):
        return " ".join(map(str, default)) or "none"
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "none" if default is None else str(default)


def from_arguments(
    arguments: Mapping[str, object], settings: Mapping[str, Setting]
) -> dict[str, Given]:
    """Return the values of :func:`parse_arguments` with their names, empty texts left out."""
    return {
        key: Given(
            _without_empty(value) if isinstance(value, list) else value,
            settings[key].option,
            "command line",
        )
        for key, value in arguments.items()
    }


# ---- the environment and the file


def from_environment(
    environ: Mapping[str, str], settings: Mapping[str, Setting], *, prog: str
) -> dict[str, Given]:
    """Return what the environment gives; lists are separated by commas.

    Names of this project that are not known here are noted on stderr.

    Raises:
        ConfigError: If a name is nearly one that is known.
    """
    by_name = {setting.env: setting for setting in settings.values()}
    given = {}
    ignored = []
    for name, text in sorted(environ.items()):
        if name in by_name:
            setting = by_name[name]
            value = _without_empty(text.split(",")) if setting.is_list else text
            given[setting.key] = Given(value, name, "environment")
        elif name.startswith(ENV_PREFIX) and name not in {CONFIG_ENV, DEBUG_ENV}:
            _refuse_typo(name, by_name)
            ignored.append(name + _suggestion(name, by_name, form=" ({})", cutoff=_SAME))
    if ignored:
        sys.stderr.write(
            f"{prog}: note: ignored, not a setting of this command: {', '.join(ignored)}\n"
        )
    return given


def _refuse_typo(name: str, known: Iterable[str]) -> None:
    words = [other.removeprefix(ENV_PREFIX) for other in known]
    close = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), words, n=1, cutoff=_CLOSE)
    if close:
        raise ConfigError(f"no such setting {name}; did you mean {ENV_PREFIX}{close[0]}?")


def from_file(file: str, settings: Mapping[str, Setting]) -> dict[str, Given]:
    """Return what a TOML file gives.

    Raises:
        ConfigError: If it cannot be read, or has a key that is not known.
    """
    if not file.strip():
        raise ConfigError("--config: the name is empty; give a TOML file or leave it out")
    try:
        content = tomllib.loads(Path(file).expanduser().read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {file}: {error.strerror}") from None
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--config: {file} is no TOML file: {error}") from None
    return {
        key: Given(value, f"{file}: {key}", f"file {file}")
        for key, value in _flat(content, settings, file=file)
    }


def _flat(
    table: Mapping[str, object], settings: Mapping[str, Setting], *, file: str, prefix: str = ""
) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        key = prefix + name
        if key in settings:
            yield key, value
        elif not any(other.startswith(f"{key}.") for other in settings):
            raise ConfigError(f"{file}: no such setting {key}{_suggestion(key, settings)}")
        elif isinstance(value, dict):
            yield from _flat(value, settings, file=file, prefix=f"{key}.")
        else:
            raise ConfigError(f"{file}: {key} is a group; write its settings below [{key}]")


def _without_empty(values: Iterable[str]) -> list[str]:
    return [value.strip() for value in values if value.strip()]


def _suggestion(
    name: str, known: Iterable[str], *, form: str = "; {}", cutoff: float = _SIMILAR
) -> str:
    """Return what may have been meant, or nothing: `inner.lr` for `lr`, else a similar name."""
    names = list(known)
    matches = [other for other in names if _leaf(other) == _leaf(name)]
    matches += difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return form.format(f"did you mean {matches[0]}?") if matches else ""


def _leaf(name: str) -> str:
    last = re.split(r"\.|__", name.removeprefix("--").removeprefix(ENV_PREFIX))[-1]
    return last.replace("-", "_").lower()
