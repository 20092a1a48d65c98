"""One peer of the memory benchmark: the swarm side alone, from joining to an outer step.

Started as ``python -m tests.benchmarks.memory_peer SETTINGS``; the orders are ``join``,
``meet`` and ``step``. Its model takes no memory: every tensor is one number, seen often.
"""

import contextlib
import json
import sys
from dataclasses import dataclass

import torch

from opendiloco.diloco import DiLoCo
from opendiloco.outer import NesterovConfig
from opendiloco.schedule import OuterSchedule
from opendiloco.state import OuterState
from opendiloco.tensors import Layout, TensorSet
from opendiloco.units import Seconds
from tests.benchmarks.orders import Answer, obey
from tests.benchmarks.swarm_side import ROUND_LIMIT, meet_others, start_averager, start_dht

_EMBEDDING_SHARE = 3  # of a small model with a large vocabulary: a third, and another for the head
_NUM_LAYERS = 12


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What a peer is told on its command line.

    Attributes:
        member: Its number, from 0.
        num_peers: How many there are.
        num_params: Of the model.
        codec: On the wire.
    """

    member: int
    num_peers: int
    num_params: int
    codec: str


class MemoryPeer:
    """The peer; the stack closes what it opened."""

    def __init__(self, settings: MemorySettings, stack: contextlib.ExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._layout = Layout.of(_shapes(settings.num_params))

    def join(self, initial_peers: list[str]) -> Answer:
        """Found a swarm, or join one, and make the outer state."""
        dht = start_dht("127.0.0.1", initial_peers, self._stack)
        (size,) = self._layout.fragment_sizes
        averager, self._tracker = start_averager(
            dht, size, self._stack, codec=self._settings.codec, matchmaking=Seconds(5.0)
        )
        self._diloco = DiLoCo(
            OuterState.initial(self._layout, self._model(0.0)),
            self._layout,
            averager=averager,
            schedule=OuterSchedule(1),
            outer=NesterovConfig(),
            round_timeout=ROUND_LIMIT,
        )
        return {"address": dht.addresses()[0]}

    def meet(self) -> Answer:
        """Wait for the others."""
        meet_others(self._tracker, self._settings.num_peers - 1)
        return {}

    def step(self) -> Answer:
        """Take an outer step with the others; return its verdict and the digest after it."""
        state = self._diloco.state
        local = self._model(0.01 * (1 + state.outer_step + self._settings.member))
        self._diloco.count(num_steps=1, num_tokens=1)
        self._tracker.update(state="averaging", outer_step=state.outer_step, digest=state.lineage)
        del state  # the round replaces it
        self._diloco.begin_round(local)
        report = self._diloco.finish_round(local)
        self._tracker.update(
            state="training", outer_step=report.outer_step, digest=self._diloco.state.lineage
        )
        return {
            "verdict": report.verdict.value,
            "num_peers": report.round.num_peers if report.round else 0,
            "digest": self._diloco.state.digest,
        }

    def _model(self, value: float) -> TensorSet:
        return {
            spec.name: torch.tensor(value).expand(spec.shape)
            for fragment in self._layout.fragments
            for spec in fragment
        }


def _shapes(num_params: int) -> dict[str, tuple[int, ...]]:
    """Return tensors of so many parameters in all, some large and many small, as models have."""
    large = num_params // _EMBEDDING_SHARE
    per_layer = (num_params - 2 * large) // _NUM_LAYERS
    rest = num_params - 2 * large - _NUM_LAYERS * per_layer
    layers = {f"layers.{index}.w": (per_layer,) for index in range(_NUM_LAYERS)}
    return {"embed.w": (large,), **layers, "norm.w": (rest,), "head.w": (large,)}


def main() -> None:
    """Carry out orders until there are no more."""
    settings = MemorySettings(**json.loads(sys.argv[1]))
    with contextlib.ExitStack() as stack:
        peer = MemoryPeer(settings, stack)
        obey({"join": peer.join, "meet": peer.meet, "step": peer.step})


if __name__ == "__main__":
    main()
