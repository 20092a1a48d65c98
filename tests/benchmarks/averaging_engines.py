"""The two averagers that the benchmark compares, over the same DHT and p2pd.

A round's figures begin when the peer is told to average. Their inputs are known vectors, so
that the outcome can be checked.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import hivemind
import torch
from hivemind.compression import CompressionBase, Float16Compression, NoCompression
from typing_extensions import override

from opendiloco.averaging.protocol import RoundRequest
from opendiloco.dht import SwarmDHT
from opendiloco.state import slice_bytes
from opendiloco.units import OuterStep, Seconds
from tests.benchmarks.swarm_side import ROUND_LIMIT, RUN_ID, meet_others, start_averager

TILE = 1 << 20
"""Vectors repeat after so many elements; hivemind's are cut into tensors of this size."""

_LOOK = 0.005  # how often to look at hivemind's stage, in seconds
_HIVEMIND_CODECS: dict[str, Callable[[], CompressionBase]] = {
    "none": NoCompression,
    "fp16": Float16Compression,
}


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What a peer is told on its command line.

    Attributes:
        engine: ``ours`` or ``hivemind``.
        address: Where it listens.
        member: Its number, from 0.
        num_peers: How many there are.
        num_elements: Of the vector.
        codec: On the wire.
        matchmaking_s: Patience for late peers.
    """

    engine: str
    address: str
    member: int
    num_peers: int
    num_elements: int
    codec: str
    matchmaking_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One round as one peer saw it; times in seconds.

    Attributes:
        round_s: From the order to average until the average is there.
        exchange_s: Thereof the exchange: from when the group was known.
        matchmaking_s: Search for the group.
        commit_s: Agreement on the result, after the exchange.
        bytes_sent: As counted by the averager; 0 if it does not count.
        num_peers: In the average.
        reason: Why it failed; empty if it did not.
    """

    round_s: float
    exchange_s: float = 0.0
    matchmaking_s: float = 0.0
    commit_s: float = 0.0
    bytes_sent: int = 0
    num_peers: int = 0
    reason: str = ""

    def encode(self) -> dict[str, object]:
        """Return them as JSON values."""
        return asdict(self)


class Engine(Protocol):
    """One peer's averager."""

    def meet(self) -> None:
        """Return when this peer sees all others."""
        ...

    def average(self, tile: torch.Tensor, number: int) -> Figures:
        """Average the vector that repeats a tile, as the round of this number."""
        ...

    def pieces(self) -> Sequence[torch.Tensor]:
        """Return the average in tiles; the last may be shorter. Empty if there is none."""
        ...


class OurEngine(Engine):
    """This project's averager, with progress records as a peer publishes them."""

    def __init__(self, settings: PeerSettings, dht: SwarmDHT, stack: contextlib.ExitStack) -> None:
        self._num_others = settings.num_peers - 1
        self._average: torch.Tensor | None = None
        self._averager, self._tracker = start_averager(
            dht,
            settings.num_elements,
            stack,
            codec=settings.codec,
            matchmaking=Seconds(settings.matchmaking_s),
        )

    @override
    def meet(self) -> None:
        meet_others(self._tracker, self._num_others)

    @override
    def average(self, tile: torch.Tensor, number: int) -> Figures:
        def fill(out: torch.Tensor) -> None:
            for piece in out.split(TILE):
                piece.copy_(tile[: piece.numel()])

        step = OuterStep(number)
        began_at = time.monotonic()
        self._tracker.update(state="averaging", outer_step=number)
        request = RoundRequest(step, 0, fill, 1.0, 1, ROUND_LIMIT)
        result = self._averager.begin(request).result(timeout=ROUND_LIMIT)
        round_s = time.monotonic() - began_at
        self._tracker.update(state="training", outer_step=number + 1)
        self._average = result.average
        return Figures(
            round_s=round_s,
            exchange_s=result.exchange,
            matchmaking_s=result.matchmaking,
            commit_s=result.commit,
            bytes_sent=result.bytes_sent,
            num_peers=result.num_peers,
            reason=result.reason,
        )

    @override
    def pieces(self) -> Sequence[torch.Tensor]:
        return () if self._average is None else self._average.split(TILE)


class HivemindEngine(Engine):
    """hivemind's own averager with a list of tensors, as its documentation shows it.

    It gets the size of the group, so that it need not wait for its patience to run out.
    """

    def __init__(self, settings: PeerSettings, dht: SwarmDHT, stack: contextlib.ExitStack) -> None:
        self._tensors = [torch.zeros(size) for size in _tile_sizes(settings.num_elements)]
        self._averager = hivemind.DecentralizedAverager(
            self._tensors,
            dht.dht,
            start=True,
            prefix=RUN_ID,
            target_group_size=settings.num_peers,
            min_matchmaking_time=settings.matchmaking_s,
            request_timeout=settings.matchmaking_s / 2,
            compression=_HIVEMIND_CODECS[settings.codec](),
            allreduce_timeout=ROUND_LIMIT,
        )
        stack.callback(self._averager.shutdown)
        self._has_average = False

    @override
    def meet(self) -> None:
        """Return at once: hivemind's peers do not look for each other before a round."""

    @override
    def average(self, tile: torch.Tensor, number: int) -> Figures:
        began_at = time.monotonic()
        with self._averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.copy_(tile[: tensor.numel()])
        searches_at = time.monotonic()
        control = self._averager.step(wait=False, timeout=ROUND_LIMIT, allow_retries=False)
        exchanges_at: float | None = None
        while not control.done():
            if exchanges_at is None and control.began_allreduce:
                exchanges_at = time.monotonic()
            time.sleep(_LOOK)
        ended_at = time.monotonic()
        if control.exception() is None:
            found_at = searches_at if exchanges_at is None else exchanges_at
            self._has_average = True
            return Figures(
                round_s=ended_at - began_at,
                exchange_s=ended_at - found_at,
                matchmaking_s=found_at - searches_at,
                num_peers=len(control.result()),
            )
        self._has_average = False
        return Figures(ended_at - began_at, reason=repr(control.exception()))

    @override
    def pieces(self) -> Sequence[torch.Tensor]:
        return self._tensors if self._has_average else ()


ENGINES: dict[str, Callable[[PeerSettings, SwarmDHT, contextlib.ExitStack], Engine]] = {
    "ours": OurEngine,
    "hivemind": HivemindEngine,
}


def tile_of(member: int, number: int) -> torch.Tensor:
    """Return what a member contributes in a round, over and over; flat float32."""
    return torch.randn(TILE, generator=torch.Generator().manual_seed(1000 * number + member))


def digest_of(pieces: Sequence[torch.Tensor]) -> str:
    """Return the SHA-256 of the pieces' bytes."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(slice_bytes(piece))
    return whole.hexdigest()


def _tile_sizes(num_elements: int) -> Iterator[int]:
    for begin in range(0, num_elements, TILE):
        yield min(TILE, num_elements - begin)
