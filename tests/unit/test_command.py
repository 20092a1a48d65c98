"""How a command ends."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from opendiloco.command import run_command
from opendiloco.errors import JoinError


def fail_with(error: BaseException) -> int:
    def main(_argv: Sequence[str]) -> int:
        raise error

    return run_command(main, [], prog="bakery")


def test_a_command_that_works_keeps_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_command(len, ["a", "b", "c"], prog="bakery")

    assert code == 3
    assert capsys.readouterr().err == ""


def test_an_error_of_ours_is_one_line_with_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENDILOCO_DEBUG", raising=False)

    code = fail_with(JoinError("nobody\nat home"))

    assert code == 3
    assert capsys.readouterr().err == "bakery: error: nobody at home\n"


def test_any_other_error_is_one_line_that_offers_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENDILOCO_DEBUG", raising=False)

    code = fail_with(ZeroDivisionError("no flour"))

    assert code == 1
    assert capsys.readouterr().err == (
        "bakery: unexpected error: ZeroDivisionError: no flour (use --debug for the traceback)\n"
    )


def test_the_environment_can_ask_for_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENDILOCO_DEBUG", "1")

    fail_with(JoinError("nobody"))

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "bakery: error: nobody"


def test_debug_among_the_arguments_asks_for_the_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_command(lambda argv: int(argv[0]), ["--debug"], prog="bakery")

    assert capsys.readouterr().err.startswith("Traceback")


def test_an_interrupt_before_the_command_handles_it_is_130_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = fail_with(KeyboardInterrupt())

    assert code == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_went_away_is_no_reason_to_say_anything(unbuffered: str) -> None:
    script = (
        "import sys; from opendiloco.command import run_command; sys.stdin.read()\n"
        "sys.exit(run_command(lambda _: sys.stdout.write('x' * 9), [], prog='bakery'))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONUNBUFFERED": unbuffered},
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr

    child.stdout.close()
    child.stdin.close()

    with child.stderr:
        assert child.stderr.read() == b""
    assert child.wait() == 1


def test_a_broken_connection_is_not_taken_for_a_reader_that_went_away() -> None:
    script = (
        "import sys; from opendiloco.command import run_command\n"
        "def main(_): raise BrokenPipeError('a socket')\n"
        "sys.exit(run_command(main, [], prog='bakery'))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={}
    )

    assert done.stderr.startswith("bakery: unexpected error: BrokenPipeError: a socket")
