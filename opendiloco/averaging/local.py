"""Peers of one process that average with each other: for tests and simulation."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from typing_extensions import override

from opendiloco.averaging.group import Member, Role
from opendiloco.averaging.protocol import ABSURD, Averager, RoundOutcome, RoundRequest, RoundResult
from opendiloco.outer import is_sound
from opendiloco.units import OuterStep, Seconds

_RoundKey = tuple[OuterStep, int, str]


@dataclass
class _Round:
    """Who has come, and what came of it; members take their contribution away at the end."""

    contributions: dict[int, tuple[torch.Tensor, RoundRequest]] = field(default_factory=dict)
    result: RoundResult | None = None


class LocalSwarm:
    """A meeting place for averagers of the same process.

    ``fragment_sizes`` are numbers of elements. A round takes place when every open member
    has come, or when somebody has waited for ``patience``; who comes later has missed it.
    """

    def __init__(self, fragment_sizes: Sequence[int], *, patience: Seconds = Seconds(5.0)) -> None:
        self.fragment_sizes = tuple(fragment_sizes)
        self._patience = patience
        self._members: set[int] = set()
        self._next_member = 0
        self._rounds: dict[_RoundKey, _Round] = {}
        self._changed = threading.Condition()

    def join(self) -> "LocalAverager":
        """Return the averager of a new member."""
        with self._changed:
            member = self._next_member
            self._next_member += 1
            self._members.add(member)
        return LocalAverager(self, member)

    def leave(self, member: int) -> None:
        """Wait for this member no longer."""
        with self._changed:
            self._members.discard(member)
            self._changed.notify_all()

    def meet(self, member: int, request: RoundRequest, contribution: torch.Tensor) -> RoundResult:
        """Contribute, wait for the others, and return the average.

        Args:
            member: Who.
            request: Its part.
            contribution: Flat float32 vector, kept until the round is over.
        """
        came_at = time.monotonic()
        patience = min(self._patience, request.timeout)
        key = (request.outer_step, request.fragment, request.lineage)
        with self._changed:
            this_round = self._rounds.setdefault(key, _Round())
            if this_round.result is not None:
                return RoundResult(
                    RoundOutcome.FAILED, attempts=1, reason="the others have averaged without us"
                )
            this_round.contributions[member] = (contribution, request)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over(this_round), timeout=patience)
            if this_round.result is None:
                this_round.result = _average(this_round)
                self._changed.notify_all()
            result = this_round.result
            assert result.average is not None  # noqa: S101 - the last member takes it away
            own = replace(
                result,
                average=result.average.clone(),
                matchmaking=Seconds(time.monotonic() - came_at),
            )
            del this_round.contributions[member]
            if not this_round.contributions:
                this_round.result = replace(result, average=None)
            return own

    def _is_over(self, this_round: _Round) -> bool:
        return this_round.result is not None or self._members <= this_round.contributions.keys()


class LocalAverager(Averager):
    """One member's way into a :class:`LocalSwarm`."""

    def __init__(self, swarm: LocalSwarm, member: int) -> None:
        self._swarm = swarm
        self._member = member
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"member-{member}")
        self._pending: Future[RoundResult] | None = None

    @override
    def begin(self, request: RoundRequest) -> Future[RoundResult]:
        """See :meth:`opendiloco.averaging.protocol.Averager.begin`."""
        if self._pending is not None and not self._pending.done():
            raise RuntimeError("the previous round is not finished")
        self._pending = self._executor.submit(self._run, request)
        return self._pending

    @override
    def close(self) -> None:
        """See :meth:`opendiloco.averaging.protocol.Averager.close`."""
        self._swarm.leave(self._member)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, request: RoundRequest) -> RoundResult:
        contribution = torch.empty(self._swarm.fragment_sizes[request.fragment])
        request.fill(contribution)
        announced = Member("", Role.FULL, request.weight, request.num_tokens)
        if not is_sound(contribution) or not announced.makes_sense:
            return RoundResult(RoundOutcome.FAILED, reason=ABSURD)
        return self._swarm.meet(self._member, request, contribution)


def _average(this_round: _Round) -> RoundResult:
    """Return the mean, summed in float64 in the members' order, as float32."""
    members = sorted(this_round.contributions)
    ordered = [this_round.contributions[member] for member in members]
    total = sum(request.weight for _, request in ordered)
    mean = torch.zeros_like(ordered[0][0], dtype=torch.float64)
    for vector, request in ordered:
        mean.add_(vector.double(), alpha=request.weight / total)
    return RoundResult(
        RoundOutcome.ALONE if len(ordered) == 1 else RoundOutcome.AVERAGED,
        average=mean.float(),
        contributors={
            str(member): request.weight
            for member, (_, request) in zip(members, ordered, strict=True)
        },
        num_tokens=sum(request.num_tokens for _, request in ordered),
        attempts=1,
    )
