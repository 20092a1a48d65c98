"""Where settings come from, which source wins, and what people read when one is wrong."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from opendiloco.errors import ConfigError
from opendiloco.settings import Settings, load_settings


class Oven(Settings):
    """Oven: how hot."""

    degrees: int = Field(default=180, gt=0, le=300, description="in Celsius")
    fan_speed: float = Field(default=0.5, description="share of 100%")


class Bakery(Settings):
    """Bake bread."""

    name: str | None = Field(default=None, description="above the door")
    flours: list[str] = Field(default=["rye"], description="what goes in")
    loaves: int = Field(default=10, ge=1, description="per day")
    crust: Literal["soft", "hard"] = Field(default="hard", description="of the bread")
    is_open: bool = Field(default=False, description="for customers")
    folder: Path = Field(default=Path("here"), description="for recipes")
    oven: Oven = Field(default_factory=Oven)


def load(*argv: str, **environ: str) -> Bakery:
    return load_settings(Bakery, argv, prog="bakery", environ=environ)


def complaint(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, **environ)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "bakery.toml"
    file.write_text('loaves = 3\nname = "file"\n[oven]\ndegrees = 210\n', "utf-8")
    return file


def test_nothing_given_means_the_defaults() -> None:
    config = load()

    assert config == Bakery(oven=Oven(degrees=180, fan_speed=0.5))


def test_an_option_of_a_group_is_written_with_a_dot_and_dashes() -> None:
    config = load("--oven.fan-speed", "0.25")

    assert config.oven == Oven(degrees=180, fan_speed=0.25)


def test_an_environment_name_of_a_group_has_two_underscores() -> None:
    config = load(OPENDILOCO_OVEN__FAN_SPEED="0.25")

    assert config.oven.fan_speed == 0.25


def test_the_file_wins_over_the_defaults(toml: Path) -> None:
    config = load("--config", str(toml))

    assert (config.loaves, config.oven.degrees, config.oven.fan_speed) == (3, 210, 0.5)


def test_the_environment_wins_over_the_file(toml: Path) -> None:
    config = load("--config", str(toml), OPENDILOCO_LOAVES="4", OPENDILOCO_OVEN__DEGREES="220")

    assert (config.name, config.loaves, config.oven.degrees) == ("file", 4, 220)


def test_the_command_line_wins_over_the_environment(toml: Path) -> None:
    config = load("--config", str(toml), "--loaves", "5", OPENDILOCO_LOAVES="4")

    assert config.loaves == 5


def test_the_file_can_be_named_by_the_environment(toml: Path) -> None:
    config = load(OPENDILOCO_CONFIG=str(toml))

    assert config.loaves == 3


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENDILOCO_LOAVES", "6")

    config = load_settings(Bakery, [], prog="bakery")

    assert config.loaves == 6


def test_a_switch_can_be_turned_off_against_the_environment() -> None:
    config = load("--no-is-open", OPENDILOCO_IS_OPEN="true")

    assert config.is_open is False


def test_a_list_takes_several_values_and_repeated_options() -> None:
    config = load("--flours", "rye", "oat", "--flours", "spelt")

    assert config.flours == ["rye", "oat", "spelt"]


def test_a_list_in_the_environment_is_separated_by_commas() -> None:
    config = load(OPENDILOCO_FLOURS="rye, oat,")

    assert config.flours == ["rye", "oat"]


@pytest.mark.parametrize("argv", [["--flours"], ["--flours", ""], ["--flours", " "]])
def test_a_list_given_without_values_is_empty_instead_of_the_default(argv: list[str]) -> None:
    config = load(*argv)

    assert config.flours == []


def test_settings_cannot_be_changed() -> None:
    config = load()

    with pytest.raises(ValueError, match="frozen"):
        config.loaves = 1


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--loafs", "1"], "no such option --loafs; did you mean --loaves?"),
        (["--loa", "1"], "no such option --loa; did you mean --loaves?"),
        (["--degrees=1"], "no such option --degrees; did you mean --oven.degrees?"),
        (["--xyzzy"], "no such option --xyzzy; see bakery --help"),
        (["stray"], "unexpected argument 'stray'; see bakery --help"),
        (["--loaves"], "--loaves: expected one argument; see bakery --help"),
        (["--loaves", ""], "--loaves: it is empty; give it a value or leave it out"),
        (["--loaves", "0"], "--loaves: must be at least 1 (got 0)"),
        (["--loaves", "many"], "--loaves: must be a valid integer (got many)"),
        (["--oven.degrees", "-1"], "--oven.degrees: must be greater than 0 (got -1)"),
        (["--oven.degrees", "999"], "--oven.degrees: must be at most 300 (got 999)"),
        (["--oven.fan-speed", "nan"], "--oven.fan-speed: must be a finite number (got nan)"),
        (["--crust", "burnt"], "--crust: must be 'soft' or 'hard' (got burnt)"),
        (["--config", ""], "--config: the name is empty; give a TOML file or leave it out"),
        (
            ["--config", "/nowhere/x"],
            "--config: cannot read /nowhere/x: No such file or directory",
        ),
    ],
)
def test_a_wrong_command_line_gets_one_helpful_line(argv: list[str], line: str) -> None:
    message = complaint(*argv)

    assert message == line


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("LOAVE", "1", "no such setting OPENDILOCO_LOAVE; did you mean OPENDILOCO_LOAVES?"),
        (
            "OVEN_DEGREES",
            "1",
            "no such setting OPENDILOCO_OVEN_DEGREES; did you mean OPENDILOCO_OVEN__DEGREES?",
        ),
        ("LOAVES", "0", "OPENDILOCO_LOAVES: must be at least 1 (got 0)"),
        ("NAME", "", "OPENDILOCO_NAME: it is empty; give it a value or leave it out"),
        ("IS_OPEN", "ajar", "OPENDILOCO_IS_OPEN: must be a valid boolean (got ajar)"),
    ],
)
def test_a_wrong_environment_gets_one_helpful_line(name: str, value: str, line: str) -> None:
    message = complaint(**{f"OPENDILOCO_{name}": value})

    assert message == line


def test_a_strange_environment_name_is_noted_and_not_fatal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load(OPENDILOCO_DEGREES="5", OPENDILOCO_WEB_PORT="80", OTHER_LOAVES="1")

    assert config == Bakery()
    assert capsys.readouterr().err == (
        "bakery: note: ignored, not a setting of this command: OPENDILOCO_DEGREES "
        "(did you mean OPENDILOCO_OVEN__DEGREES?), OPENDILOCO_WEB_PORT\n"
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("loave = 1", "no such setting loave; did you mean loaves?"),
        ("[oven]\ndegree = 1", "no such setting oven.degree; did you mean oven.degrees?"),
        ("[xyzzy]\na = 1", "no such setting xyzzy"),
        ("oven = 3", "oven is a group; write its settings below [oven]"),
        ("loaves = 0", "loaves: must be at least 1 (got 0)"),
        ("flours = 'rye'", "flours: must be a valid list (got rye)"),
        ("flours = ['rye', 3]", "flours: must be a valid string (got 3)"),
    ],
)
def test_a_wrong_file_gets_one_helpful_line(tmp_path: Path, content: str, line: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(content, "utf-8")

    message = complaint("--config", str(file))

    assert message == f"{file}: {line}"


@pytest.mark.parametrize("content", [b"loaves = = 1", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "wrong.toml"
    file.write_bytes(content)

    message = complaint("--config", str(file))

    assert message.startswith(f"--config: {file} is no TOML file: ")


def test_a_setting_without_a_default_must_be_given() -> None:
    class Shop(Settings):
        street: str = Field(description="where it is")

    with pytest.raises(ConfigError) as caught:
        load_settings(Shop, [], prog="shop", environ={})

    assert str(caught.value) == "--street: it is missing and has no default"


def test_a_long_wrong_value_is_not_shown_in_full() -> None:
    message = complaint("--loaves", "9x" * 5000)

    assert len(message) < 200


def test_print_config_says_where_each_value_comes_from(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--print-config", "--config", str(toml), "--is-open"]

    with pytest.raises(SystemExit) as caught:
        load(*argv, OPENDILOCO_FLOURS="rye,oat")

    assert caught.value.code == 0
    assert capsys.readouterr().out.splitlines() == [
        f'name = "file"  # file {toml}',
        'flours = ["rye", "oat"]  # environment',
        f"loaves = 3  # file {toml}",
        'crust = "hard"  # default',
        "is_open = true  # command line",
        'folder = "here"  # default',
        f"oven.degrees = 210  # file {toml}",
        "oven.fan_speed = 0.5  # default",
    ]


def test_printed_settings_are_a_file_with_the_same_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--flours", 'a "b"\\', "--folder", "ä", "--oven.fan-speed", "1e-7"]
    with pytest.raises(SystemExit):
        load("--print-config", *argv)
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out, "utf-8")

    config = load("--config", str(file))

    assert "name" not in tomllib.loads(file.read_text("utf-8"))
    assert config == load(*argv)


def test_print_config_of_wrong_settings_is_an_error() -> None:
    message = complaint("--print-config", "--loaves", "0")

    assert message == "--loaves: must be at least 1 (got 0)"


def test_help_shows_every_setting_with_default_description_and_environment_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    with pytest.raises(SystemExit) as caught:
        load("--help")

    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Bake bread.",
        "--name VALUE above the door (default: none) [OPENDILOCO_NAME]",
        "--flours [VALUE ...] what goes in (default: rye) [OPENDILOCO_FLOURS]",
        "--loaves N per day (default: 10) [OPENDILOCO_LOAVES]",
        "--crust soft|hard of the bread (default: hard) [OPENDILOCO_CRUST]",
        "--is-open, --no-is-open for customers (default: no) [OPENDILOCO_IS_OPEN]",
        "--folder PATH for recipes (default: here) [OPENDILOCO_FOLDER]",
        "Oven: how hot: --oven.degrees N in Celsius (default: 180) [OPENDILOCO_OVEN__DEGREES]",
        "--oven.fan-speed X share of 100% (default: 0.5) [OPENDILOCO_OVEN__FAN_SPEED]",
    ):
        assert part in text


def test_importing_the_settings_imports_nothing_heavy() -> None:
    script = (
        "import sys, opendiloco.settings, peers.config\n"
        "sys.stdout.write(str({'torch', 'hivemind', 'transformers', 'numpy'} & {*sys.modules}))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout == "set()"
