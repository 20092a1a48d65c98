"""The command's roof."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType

import pytest

from opendiloco.cli import main


@pytest.fixture
def peer_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Put a command in the place of the peer; gives what it was called with."""
    calls: list[list[str]] = []

    def fake_main(argv: Sequence[str]) -> int:
        calls.append(list(argv))
        return 3

    module = ModuleType("peers.cli")
    module.main = fake_main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peers.cli", module)
    return calls


def test_a_subcommand_gets_the_rest_and_gives_the_exit_code(peer_calls: list[list[str]]) -> None:
    code = main(["peer", "--seed", "1", "--help"])

    assert code == 3
    assert peer_calls == [["--seed", "1", "--help"]]


def test_without_arguments_those_of_the_process_count(
    peer_calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["opendiloco", "peer", "--seed", "2"])

    code = main()

    assert code == 3
    assert peer_calls == [["--seed", "2"]]


def test_a_subcommand_that_cannot_be_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENDILOCO_DEBUG", raising=False)
    monkeypatch.setitem(sys.modules, "peers.cli", None)

    code = main(["peer"])

    assert code == 1
    line = capsys.readouterr().err
    assert line.startswith("opendiloco peer: unexpected error: ModuleNotFoundError: ")
    assert line.count("\n") == 1


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_the_subcommands(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([option])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert {"demo", "bootstrap", "peer"} <= {line.split()[0] for line in lines if line}
    assert lines[-1] == "See `opendiloco COMMAND --help` for the settings of a command."


def test_no_subcommand_is_wrong_usage_with_the_help_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main([])

    streams = capsys.readouterr()
    assert code == 2
    assert streams.out == ""
    assert streams.err.startswith("usage: opendiloco COMMAND ...\n")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["pere"], "opendiloco: error: no such command 'pere'; did you mean peer?\n"),
        (["xyzzy"], "opendiloco: error: no such command 'xyzzy'; see opendiloco --help\n"),
        (["--hepl"], "opendiloco: error: no such option '--hepl'; did you mean --help?\n"),
    ],
)
def test_an_unknown_subcommand_is_wrong_usage_with_a_hint(
    argv: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENDILOCO_DEBUG", raising=False)

    code = main(argv)

    assert code == 2
    assert capsys.readouterr().err == line


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--version"])

    assert code == 0
    assert capsys.readouterr().out == f"opendiloco {version('opendiloco')}\n"


def test_python_m_opendiloco_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opendiloco", "demoo"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("did you mean demo?")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from opendiloco.cli import main; main(['--help'])\n"
        "sys.stderr.write(str({'torch', 'hivemind', 'pydantic', 'numpy'} & {*sys.modules}))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stderr == "set()"
