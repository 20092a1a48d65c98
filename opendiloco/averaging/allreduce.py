"""The arithmetic of one exchange: contributions go out, averages come in, part by part."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

import torch

from opendiloco.averaging.codecs import Codec, Payload
from opendiloco.averaging.frames import Frame, FrameKind, bits
from opendiloco.averaging.group import Group, Parts
from opendiloco.averaging.messages import Plan
from opendiloco.averaging.protocol import RoundPhase
from opendiloco.averaging.reducer import PartReducer, decode_checked, part_digest, scratch

T = TypeVar("T")


class Outlet(Protocol):
    """How frames reach other members; to those that are lost they go nowhere."""

    def post(self, member: int, frame: Frame) -> None:
        """Have a frame sent as soon as possible."""
        ...

    def send(self, member: int, frame: Frame) -> Awaitable[None]:
        """Have a bulk frame sent; done when few enough others are waiting."""
        ...


class AllReduce:
    """One member's share of the work.

    Every part has one reducer. It averages what the members send, encodes the average once,
    and everybody uses what that decodes to, so that all hold the same bytes. Parts are
    written into the vector in place, each over a contribution that is needed no more: as
    long as nobody has a part's average, all of its contributions are still there, and it can
    be averaged anew by somebody else when its reducer is lost.

    Attributes:
        parts: How the vector is cut.
        members: Who takes part; changed by :meth:`freeze`.
        have: Parts whose average is here, as a bit set.
        vote: Digest of the whole average; empty until it is complete.
        contributors: Members whose data is in the parts that are here, as a bit set.
    """

    def __init__(
        self,
        group: Group,
        vector: torch.Tensor,
        codec: Codec,
        *,
        outlet: Outlet,
        executor: Executor,
        observe: Callable[[RoundPhase], None],
    ) -> None:
        """Prepare.

        Args:
            group: Who takes part.
            vector: This member's contribution, flat float32; becomes the average. Of an
                auxiliary only its size counts.
            codec: How parts travel; the same on all members.
            outlet: Reaches the other members.
            executor: Runs what takes longer than a moment.
            observe: Hears of every phase as it begins.
        """
        self._group = group
        self._trains = group.members[group.me].is_trainer
        self._vector = vector
        self._codec = codec
        self._outlet = outlet
        self._executor = executor
        self._observe = observe
        self.members = frozenset(range(len(group.members))) - group.senseless
        reducers = group.reducers & self.members
        self.parts = Parts.of(
            vector.numel(), num_reducers=len(reducers), block_elements=codec.block_elements
        )
        self._reducer_of = dict(enumerate(self.parts.reducers(reducers)))
        self._version = 0
        self._frozen = False
        self._is_stopped = False
        weights = {i: group.members[i].weight for i in group.trainers & self.members}
        self._sums = PartReducer(codec, weights)
        self._arrived: dict[int, int] = {}  # who has contributed to a part, as a bit set
        self._made: dict[int, Frame] = {}  # of an auxiliary, which keeps no vector
        self._wanted: dict[int, set[int]] = {}
        self._applying: set[int] = set()
        self._changed = asyncio.Condition()
        self._jobs: set[asyncio.Future[Any]] = set()
        self._phases: set[RoundPhase] = set()
        self._digests: dict[int, bytes] = {}
        self._contributors_to: dict[int, int] = {}
        self.have = 0
        self.vote = ""
        self.contributors = 0

    async def contribute(self, reducer: int) -> None:
        """Send this member's share to one reducer, under the present plan."""
        version = self._version
        if not self._trains or reducer == self._group.me:
            return
        for part in [part for part, who in self._reducer_of.items() if who == reducer]:
            if self._has(part):
                continue
            encoded = await self._in_thread(self._codec.encode, self._view(part))
            if self._version != version or self._frozen:
                return
            frame = Frame(FrameKind.CONTRIBUTION, self._group.tag, part, version)
            await self._outlet.send(reducer, frame.carrying(encoded.payload))

    async def take_contribution(self, sender: int, frame: Frame) -> None:
        """Add what a member sent to the sum of a part.

        Raises:
            SenselessPartError: If it cannot be used.
        """
        async with self._changed:  # the plan that it belongs to may still be on its way
            await self._changed.wait_for(lambda: self._version >= frame.version or self._is_stopped)
        part, version = frame.part, self._version
        expected = frame.version == version and self._reducer_of.get(part) == self._group.me
        if not expected or self._frozen or sender not in self._group.trainers or self._has(part):
            return
        self._enter_phase(RoundPhase.FIRST_PART)
        size = len(self._view(part))
        await self._in_thread(self._sums.add, part, size, sender, frame.payload)
        if version == self._version and not self._frozen:
            self._arrived[part] = self._arrived.get(part, 0) | 1 << sender
            await self._finish_if_ready(part)

    async def take_average(self, frame: Frame) -> None:
        """Write a part of the average into the vector.

        Raises:
            SenselessPartError: If it cannot be used.
        """
        if not self._trains or frame.part >= len(self.parts) or self._has(frame.part):
            return
        self._enter_phase(RoundPhase.FIRST_PART)
        async with self._applying_part(frame.part):
            self._register(frame, await self._in_thread(self._apply, frame))

    async def finish_ready(self) -> None:
        """Finish the parts for which nobody is waited for."""
        for part in [part for part, who in self._reducer_of.items() if who == self._group.me]:
            await self._finish_if_ready(part)

    def freeze(self, members: frozenset[int]) -> None:
        """Go on with fewer members; no part is finished before the next plan."""
        self.members = members
        self._frozen = True

    async def settle(self) -> None:
        """Return when no part is being written."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._applying)

    async def follow(self, plan: Plan) -> list[int]:
        """Average anew what nobody has.

        Returns:
            The parts that this member must fetch from those that have them.
        """
        self._frozen = False
        self._version = plan.view
        self._sums.forget()
        self._arrived.clear()
        self._reducer_of = dict(plan.reducers)
        async with self._changed:
            self._changed.notify_all()
        return [part for part in plan.holders if self._trains and not self._has(part)]

    def missing_from(self, reducer: int) -> list[int]:
        """Return the parts that this member wants and lacks, of those that a reducer averages."""
        parts = [part for part, who in self._reducer_of.items() if who == reducer]
        return [part for part in parts if self._trains and not self._has(part)]

    def give(self, member: int, part: int) -> None:
        """Send a part of the average to a member that misses it, now or once it is here."""
        if part in self._made:
            self._outlet.post(member, self._made[part])
        elif self.have >> part & 1:
            # What was decoded encodes to the payload that it came from.
            payload = self._codec.encode(self._view(part)).payload
            self._outlet.post(member, self._average(part, self._contributors_to[part], payload))
        elif part < len(self.parts) and self._reducer_of.get(part) != self._group.me:
            self._wanted.setdefault(part, set()).add(member)

    async def stop(self) -> None:
        """Return when nothing touches the vector any more."""
        self._is_stopped = self._frozen = True
        async with self._changed:
            self._changed.notify_all()
        while self._jobs:
            await asyncio.wait(self._jobs)

    async def _finish_if_ready(self, part: int) -> None:
        others = (self._group.trainers & self.members) - {self._group.me}
        if self._frozen or self._has(part) or bits(others) & ~self._arrived.get(part, 0):
            return
        if not (others or self._trains):
            return
        async with self._applying_part(part):
            frame, digest = await self._in_thread(self._finish, part)
            for member in others:
                self._outlet.post(member, frame)
            if not self._trains:
                self._made[part] = frame
            self._register(frame, digest)

    def _finish(self, part: int) -> tuple[Frame, bytes]:
        """Average a part; runs in a thread."""
        if self._trains:
            self._sums.add_values(part, self._group.me, self._view(part))
        averaged = self._sums.finish(part)
        if self._trains:
            self._view(part).copy_(averaged.values)
        frame = self._average(part, bits(averaged.contributors), averaged.payload)
        return frame, part_digest(frame.payload, frame.contributors)

    def _average(self, part: int, contributors: int, payload: Payload) -> Frame:
        return Frame(FrameKind.AVERAGE, self._group.tag, part, 0, contributors, payload)

    def _apply(self, frame: Frame) -> bytes:
        """Write a part of the average into the vector; runs in a thread."""
        view = self._view(frame.part)
        values = scratch(len(view))
        decode_checked(self._codec, frame.payload, values)
        view.copy_(values)
        return part_digest(frame.payload, frame.contributors)

    def _register(self, frame: Frame, digest: bytes) -> None:
        """Take note that the average of a part is here."""
        self.have |= 1 << frame.part
        self._digests[frame.part] = digest
        self._contributors_to[frame.part] = frame.contributors
        self.contributors |= frame.contributors
        if 2 * len(self._digests) >= len(self.parts):
            self._enter_phase(RoundPhase.EXCHANGE)
        for member in self._wanted.pop(frame.part, set()):
            self.give(member, frame.part)
        if self._trains and len(self._digests) == len(self.parts):
            self._enter_phase(RoundPhase.COMMIT)
            ordered = (self._digests[part] for part in range(len(self.parts)))
            self.vote = hashlib.sha256(b"".join(ordered)).hexdigest()

    def _has(self, part: int) -> bool:
        """Return whether the average of a part is here, or being written."""
        return bool(self.have >> part & 1) or part in self._applying

    def _view(self, part: int) -> torch.Tensor:
        begin, end = self.parts.bounds(part)
        return self._vector[begin:end]

    @contextlib.asynccontextmanager
    async def _applying_part(self, part: int) -> AsyncIterator[None]:
        self._applying.add(part)
        try:
            yield
        finally:
            self._applying.discard(part)
            if not self._applying:
                async with self._changed:
                    self._changed.notify_all()

    def _enter_phase(self, phase: RoundPhase) -> None:
        if phase not in self._phases:
            self._phases.add(phase)
            self._observe(phase)

    def _in_thread(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:  # noqa: ANN401 - whatever the work takes
        job = asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job
