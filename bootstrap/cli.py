"""The command `opendiloco bootstrap`."""

from collections.abc import Sequence

from bootstrap.config import BootstrapConfig
from opendiloco.settings import load_settings, run_command

PROG = "opendiloco bootstrap"


def main(argv: Sequence[str]) -> int:
    """Run a bootstrap node until it is told to leave; returns the exit code."""
    return run_command(_main, argv, prog=PROG)


def _main(argv: Sequence[str]) -> int:
    config = load_settings(BootstrapConfig, argv, prog=PROG)
    from bootstrap.node import run_node  # hivemind takes seconds to import

    run_node(config)
    return 0
