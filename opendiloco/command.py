"""How a command ends: its exit code, and one line on stderr when something is wrong."""

import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence

from opendiloco.errors import OpenDiLoCoError

DEBUG_ENV = "OPENDILOCO_DEBUG"

_YES = {"1", "true", "t", "yes", "y", "on"}
_INTERRUPTED = 130
_UNEXPECTED = 1


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str], *, prog: str) -> int:
    """Call a command and return its exit code; what it raises becomes one line on stderr.

    The traceback is shown as well when ``--debug`` is among the arguments or
    ``OPENDILOCO_DEBUG`` is set. Nothing is said when nobody reads stdout any more.

    Args:
        main: The command; takes the arguments and returns the exit code.
        argv: The arguments.
        prog: The command's name, for messages.
    """
    try:
        try:
            return main(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before the command could handle it itself
        return _INTERRUPTED
    except OpenDiLoCoError as error:
        _complain(f"{prog}: error: {error}", argv)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the process ends here
        if isinstance(error, BrokenPipeError) and _is_stdout_broken():
            return _UNEXPECTED
        text = f"{type(error).__name__}: {error}"
        _complain(f"{prog}: unexpected error: {text} (use --debug for the traceback)", argv)
        return _UNEXPECTED


def _complain(line: str, argv: Sequence[str]) -> None:
    if "--debug" in argv or os.environ.get(DEBUG_ENV, "").lower() in _YES:
        traceback.print_exc()
    sys.stderr.write(" ".join(line.split()) + "\n")


def _is_stdout_broken() -> bool:
    """Return whether nobody reads stdout; if so, the flush at the interpreter's end is safe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported without being asked for
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
