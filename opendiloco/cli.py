"""The command's roof: finds the subcommand and imports the rest only then."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from opendiloco import __version__
from opendiloco.command import run_command
from opendiloco.errors import ConfigError

_COMMANDS = {
    "demo": ("peers.demo.cli", "see it work: a bootstrap and some peers on this machine"),
    "bootstrap": ("bootstrap.cli", "a way in for peers: a node that never trains"),
    "peer": ("peers.cli", "join a swarm, or found one, and train"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name; returns the exit code.

    Args:
        argv: The arguments; those of this process when None.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = arguments[0] if arguments else ""
    if name not in _COMMANDS:
        return run_command(_about, arguments, prog="opendiloco")

    def subcommand(rest: Sequence[str]) -> int:
        code: int = importlib.import_module(_COMMANDS[name][0]).main(rest)
        return code

    return run_command(subcommand, arguments[1:], prog=f"opendiloco {name}")


def _about(arguments: Sequence[str]) -> int:
    """Answer everything that is no subcommand."""
    match arguments:
        case ["--help" | "-h", *_]:
            sys.stdout.write(_help())
        case ["--version", *_]:
            sys.stdout.write(f"opendiloco {__version__}\n")
        case [name, *_]:
            what = "option" if name.startswith("-") else "command"
            close = difflib.get_close_matches(name, [*_COMMANDS, "--help", "--version"], n=1)
            hint = f"did you mean {close[0]}?" if close else "see opendiloco --help"
            raise ConfigError(f"no such {what} {name!r}; {hint}")
        case _:
            sys.stderr.write(_help())
            return ConfigError.exit_code
    return 0


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: opendiloco COMMAND ...",
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
