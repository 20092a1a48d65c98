"""Settings of a command: command line over environment over TOML file over defaults."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from opendiloco.command import run_command
from opendiloco.errors import ConfigError
from opendiloco.sources import (
    CONFIG_ENV,
    Given,
    Setting,
    from_arguments,
    from_environment,
    from_file,
    parse_arguments,
    settings_of,
)

__all__ = ["Settings", "UserPath", "load_settings", "run_command"]

_MAX_SHOWN = 80  # characters of a wrong value in a message


class Settings(BaseModel):
    """Base of all settings, whole commands and groups of them: immutable, checked, finite.

    Each field has a description for ``--help``; a field that is itself a :class:`Settings`
    is a group, titled by its docstring.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # ~somebody who does not exist
        raise ValueError(f"{path}: {error}") from None


UserPath = Annotated[Path, AfterValidator(_expanded)]
"""A path in which `~` means a home folder."""

T = TypeVar("T", bound=Settings)


def load_settings(
    cls: type[T], argv: Sequence[str], *, prog: str, environ: Mapping[str, str] | None = None
) -> T:
    """Return the settings of a command.

    The command line (``--diloco.inner-steps 10``) wins over the environment
    (``OPENDILOCO_DILOCO__INNER_STEPS``), that over the TOML file of ``--config`` or
    ``OPENDILOCO_CONFIG``, and that over the defaults. ``--help`` and ``--print-config`` write to
    stdout instead and exit.

    An environment is shared by all commands of a container, so a name in it that this command
    does not know is an error only when it is nearly one that it knows; others get a note on stderr.

    Args:
        cls: What the command can be told.
        argv: The arguments after the command's name.
        prog: The command's name, for messages.
        environ: Instead of the environment of this process.

    Raises:
        ConfigError: If a setting is unknown, wrong or empty; one line names it and the remedy.
        SystemExit: With code 0, after ``--help`` and ``--print-config``.
    """
    environ = os.environ if environ is None else environ
    settings = {setting.key: setting for setting in settings_of(cls)}
    arguments = parse_arguments(cls, settings, argv, prog=prog)
    show_config = arguments.pop("print_config", False)
    file = arguments.pop("config", environ.get(CONFIG_ENV))
    given = from_file(str(file), settings) if file is not None else {}
    given |= from_environment(environ, settings, prog=prog)
    given |= from_arguments(arguments, settings)
    for item in given.values():
        if isinstance(item.value, str) and not item.value.strip():
            raise ConfigError(f"{item.name}: it is empty; give it a value or leave it out")
    try:
        config = cls.model_validate(_nested(given))
    except ValidationError as error:
        raise ConfigError(_explain(error, given, settings)) from None
    if show_config:
        sys.stdout.writelines(_resolved(config, given, settings))
        raise SystemExit(0)
    return config


def _nested(given: Mapping[str, Given]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key, item in given.items():
        *groups, name = key.split(".")
        table = tree
        for group in groups:
            table = table.setdefault(group, {})  # type: ignore[assignment]
        table[name] = item.value
    return tree


def _explain(
    error: ValidationError, given: Mapping[str, Given], settings: Mapping[str, Setting]
) -> str:
    """Return pydantic's first complaint as one line that names the setting."""
    first = error.errors(include_url=False)[0]
    text = first["msg"].removeprefix("Value error, ")
    parts = [part for part in first["loc"] if isinstance(part, str)]
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    key = next((prefix for prefix in prefixes if prefix in settings), None)
    if key is None:  # about several settings at once: the text names them
        return text
    name = given[key].name if key in given else settings[key].option
    if first["type"] == "value_error":
        return f"{name}: {text}"
    if first["type"] == "missing":
        return f"{name}: it is missing and has no default"
    text = re.sub(r"^\w+ should ", "must ", text).split(", unable ")[0]
    text = text.replace("greater than or equal to", "at least")
    text = text.replace("less than or equal to", "at most")
    return f"{name}: {text} (got {_shown(first['input'])})"


def _shown(value: object) -> str:
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _resolved(
    config: Settings, given: Mapping[str, Given], settings: Mapping[str, Setting]
) -> Iterator[str]:
    """Yield the lines of a TOML file that has the same effect as everything given."""
    for key in settings:
        value = _value_of(config, key)
        source = given[key].source if key in given else "default"
        if value is None or value == []:
            yield f"# {key} is not set  # {source}\n"
        else:
            yield f"{key} = {_toml(value)}  # {source}\n"


def _value_of(config: Settings, key: str) -> object:
    return reduce(getattr, key.split("."), config)


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int | float):
        return repr(value).lower()
    return json.dumps(str(value), ensure_ascii=False)
