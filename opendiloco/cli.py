"""The command's roof: finds the subcommand and imports the rest only then."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from opendiloco import __version__

_COMMANDS = {
    "demo": ("peers.demo", "see it work: a bootstrap and some peers on this machine"),
    "bootstrap": ("bootstrap.cli", "a way in for peers: a node that never trains"),
    "peer": ("peers.cli", "join a swarm, or found one, and train"),
}
_USAGE = "usage: opendiloco COMMAND ..."
_WRONG_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name; returns the exit code.

    Args:
        argv: The arguments; those of this process when None.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments:
        sys.stderr.write(_help())
        return _WRONG_USAGE
    name, *rest = arguments
    if name in {"--help", "-h"}:
        return _show(_help())
    if name == "--version":
        return _show(f"opendiloco {__version__}\n")
    if name not in _COMMANDS:
        return _refuse(name)
    return _run(name, rest)


def _run(name: str, rest: Sequence[str]) -> int:
    from opendiloco.settings import run_command  # imports pydantic, which --help can do without

    def imported_main(rest: Sequence[str]) -> int:
        code: int = importlib.import_module(_COMMANDS[name][0]).main(rest)
        return code

    return run_command(imported_main, rest, prog=f"opendiloco {name}")


def _refuse(name: str) -> int:
    what = "option" if name.startswith("-") else "command"
    close = difflib.get_close_matches(name, [*_COMMANDS, "--help", "--version"], n=1)
    hint = f"did you mean {close[0]}?" if close else "see opendiloco --help"
    sys.stderr.write(f"opendiloco: error: no such {what} {name!r}; {hint}\n")
    return _WRONG_USAGE


def _show(text: str) -> int:
    sys.stdout.write(text)
    return 0


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in _COMMANDS.items()]
    return "\n".join(
        [
            _USAGE,
            "",
            "Train language models on machines that share nothing but the internet.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  --help     show this and exit",
            "  --version  show the version and exit",
            "",
            "See `opendiloco COMMAND --help` for the settings of a command.",
            "",
        ]
    )
