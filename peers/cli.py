"""The command `opendiloco peer`."""

from collections.abc import Sequence

from opendiloco.settings import load_settings, run_command
from peers.config import PeerConfig

PROG = "opendiloco peer"


def main(argv: Sequence[str]) -> int:
    """Run a peer; returns the exit code."""
    return run_command(_main, argv, prog=PROG)


def _main(argv: Sequence[str]) -> int:
    config = load_settings(PeerConfig, argv, prog=PROG)
    from peers.train import run_peer  # torch and hivemind take seconds to import

    run_peer(config)
    return 0
