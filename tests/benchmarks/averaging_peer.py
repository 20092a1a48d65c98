"""One peer of the averaging benchmark: averages known vectors when it is told to.

Started as ``python -m tests.benchmarks.averaging_peer SETTINGS``. The orders are ``join``,
``meet``, and for every round ``prepare``, ``average`` and ``check``: what does not belong to
the round is done before and after it, so that it can be left out of the round's cost.
"""

import contextlib
import json
import sys

import torch

from tests.benchmarks.averaging_engines import (
    ENGINES,
    Engine,
    PeerSettings,
    digest_of,
    tile_of,
)
from tests.benchmarks.orders import Answer, obey
from tests.benchmarks.swarm_side import start_dht


class BenchmarkPeer:
    """The peer; it closes what it opened on the stack."""

    def __init__(self, settings: PeerSettings, stack: contextlib.ExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._engine: Engine | None = None
        self._tile = torch.empty(0)
        self._expected = torch.empty(0)
        self._number = 0

    def join(self, initial_peers: list[str]) -> Answer:
        """Found a swarm, or join one, and start the averager."""
        dht = start_dht(self._settings.address, initial_peers, self._stack)
        self._engine = ENGINES[self._settings.engine](self._settings, dht, self._stack)
        return {"address": dht.addresses()[0]}

    def meet(self) -> Answer:
        """Wait for the others."""
        self._joined.meet()
        return {}

    def prepare(self, number: int) -> Answer:
        """Make this peer's vector for a round, and the average to expect."""
        num_peers = self._settings.num_peers
        self._number = number
        self._tile = tile_of(self._settings.member, number)
        self._expected = torch.zeros_like(self._tile)
        for member in range(num_peers):
            self._expected.add_(tile_of(member, number), alpha=1 / num_peers)
        return {}

    def average(self) -> Answer:
        """Take part in the round."""
        return self._joined.average(self._tile, self._number).encode()

    def check(self) -> Answer:
        """Say what this peer has now: its digest, and how far it is from what was expected."""
        pieces = self._joined.pieces()
        errors = [(piece - self._expected[: piece.numel()]).abs().max().item() for piece in pieces]
        return {"digest": digest_of(pieces), "error": max(errors, default=0.0)}

    @property
    def _joined(self) -> Engine:
        assert self._engine is not None, "join comes first"
        return self._engine


def main() -> None:
    """Carry out orders until there are no more."""
    settings = PeerSettings(**json.loads(sys.argv[1]))
    with contextlib.ExitStack() as stack:
        peer = BenchmarkPeer(settings, stack)
        obey(
            {
                "join": peer.join,
                "meet": peer.meet,
                "prepare": peer.prepare,
                "average": peer.average,
                "check": peer.check,
            }
        )


if __name__ == "__main__":
    main()
