"""One all-reduce after which all members hold the same bytes, or nobody has an average."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from opendiloco.averaging.agreement import Agreement
from opendiloco.averaging.allreduce import AllReduce
from opendiloco.averaging.codecs import Codec
from opendiloco.averaging.frames import Frame, FrameKind, bits, indices_of
from opendiloco.averaging.group import Group
from opendiloco.averaging.lines import Connect, Knock, Lines
from opendiloco.averaging.messages import (
    Abort,
    Commit,
    Leave,
    Message,
    Plan,
    Status,
    View,
    Want,
    decode_message,
    short_reason,
)
from opendiloco.averaging.protocol import RoundPhase
from opendiloco.averaging.reducer import SenselessPartError
from opendiloco.units import Seconds

_WEIGH = Seconds(0.25)  # accusations with one cause arrive within this time
_FLUSH = Seconds(1.0)  # for the last words to others, before the exchange ends
_TICK = Seconds(0.25)


class ExchangeError(Exception):
    """There is no average, and why."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an exchange finds on its machine.

    Attributes:
        connect: Returns the link to a member.
        knock: Tells whether a member is still there.
        executor: Runs what takes longer than a moment.
        observe: Hears of every phase as it begins.
        stall: A member that is silent for longer is excluded.
        timeout: After this long the exchange has failed.
    """

    connect: Connect
    knock: Knock
    executor: Executor
    observe: Callable[[RoundPhase], None]
    stall: Seconds
    timeout: Seconds


@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """What came of an exchange that was decided.

    Attributes:
        contributors: Indices of the members whose data is in the average.
        exchange: Time until this member had the whole average.
        commit: Time from then until it was decided.
        bytes_sent: Of frames to others.
        bytes_received: Of frames from others.
    """

    contributors: tuple[int, ...]
    exchange: Seconds
    commit: Seconds
    bytes_sent: int
    bytes_received: int


class Exchange:
    """One member's side of one all-reduce: who takes part, for how long, and how it ends."""

    def __init__(
        self, group: Group, vector: torch.Tensor, codec: Codec, surroundings: Surroundings
    ) -> None:
        """Prepare.

        Args:
            group: Who takes part.
            vector: This member's contribution, flat float32; becomes the average. Of an
                auxiliary only its size counts.
            codec: How parts travel; the same on all members.
            surroundings: What there is on this machine.
        """
        self.group = group
        self._surroundings = surroundings
        self._lines = Lines(group, surroundings.connect, stall=surroundings.stall)
        self._work = AllReduce(
            group,
            vector,
            codec,
            outlet=self._lines,
            executor=surroundings.executor,
            observe=surroundings.observe,
        )
        self._agreement = Agreement(group, num_parts=len(self._work.parts), send=self._lines.say)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[Commit | Abort] = asyncio.get_running_loop().create_future()
        self._accused_at: float | None = None
        self._planned_view = 0
        self._began_at = time.monotonic()
        self._voted_at: float | None = None

    async def run(self) -> ExchangeReport:
        """Take part until it is decided.

        Raises:
            ExchangeError: If there is no average; the vector holds rubbish.
        """
        try:
            for other in sorted(self._agreement.members - {self.group.me}):
                if self.group.are_linked(self.group.me, other):
                    self._start(self._attach(other))
            self._start(self._watch())
            self._start(self._finish_ready())
            decision = await self._over
            if isinstance(decision, Commit):
                # Who decided may have died before all have heard it.
                self._lines.say_to_all(decision)
                await self._lines.flush(within=_FLUSH)
        except BaseException as error:
            why = short_reason(f"left: {str(error) or 'gave up'}")
            self._lines.say_to_all(Leave(reason=why))
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            self._lines.forget()
            await self._work.stop()
        if isinstance(decision, Abort):
            raise ExchangeError(decision.reason)
        if self._work.vote != decision.digest and self.group.me in self.group.trainers:
            raise ExchangeError("the others have agreed on an average that this peer lacks")
        ended_at = time.monotonic()
        voted_at = self._voted_at or ended_at
        return ExchangeReport(
            contributors=tuple(indices_of(self._work.contributors)),
            exchange=Seconds(voted_at - self._began_at),
            commit=Seconds(ended_at - voted_at),
            bytes_sent=self._lines.bytes_sent,
            bytes_received=self._lines.bytes_received,
        )

    @property
    def decision(self) -> Commit | Abort | None:
        """How it ended; None while it is open."""
        return self._agreement.decision

    @property
    def dropped(self) -> tuple[tuple[str, str], ...]:
        """Peer ids of members that were lost on the way, and why."""
        lost = {**self._agreement.suspects, **self._agreement.view.excluded}
        return tuple((self.group.members[i].peer_id, why) for i, why in sorted(lost.items()))

    async def receive(self, peer_id: str, frame: Frame) -> None:
        """Take a frame that belongs to this exchange."""
        sender = self.group.index_of.get(peer_id)
        if sender is None or sender not in self._agreement.members or self._over.done():
            return
        self._lines.bytes_received += frame.num_bytes
        try:
            if frame.kind is FrameKind.CONTRIBUTION:
                await self._work.take_contribution(sender, frame)
            elif frame.kind is FrameKind.AVERAGE:
                self._check_contributors(frame)
                await self._work.take_average(frame)
            elif frame.kind is not FrameKind.PING:
                self._take_message(sender, decode_message(frame.kind, frame.payload))
        except (SenselessPartError, ValueError) as error:
            self._suspect(sender, str(error))
        except Exception as error:  # noqa: BLE001 - the round must end, whatever is wrong here
            self._fail(f"unexpected error: {error!r}")
        self._vote_if_complete()

    def lose(self, peer_id: str, reason: str, *, may_return: bool) -> None:
        """Take note that the link to a peer is lost, and whether to try to connect anew."""
        member = self.group.index_of.get(peer_id)
        if member is None or self._over.done():
            return
        if may_return and member in self._agreement.members and self._lines.reaches(member):
            self._start(self._reattach(member, reason))
        elif not may_return:
            self._suspect(member, reason)

    async def _attach(self, other: int) -> None:
        """Connect to a member, and contribute to the parts that it reduces."""
        try:
            await self._lines.attach(other)
        except ConnectionError as error:
            self._suspect(other, str(error))
        else:
            await self._work.contribute(other)

    async def _reattach(self, other: int, reason: str) -> None:
        """Connect anew to a member, and do again what may have been lost with the link."""
        try:
            await self._lines.reattach(other, self._surroundings.knock)
        except ConnectionError:
            self._suspect(other, reason)
            return
        self._agreement.repeat(other)
        self._report()
        missing = self._work.missing_from(other)
        if missing:
            self._lines.say(other, Want(parts=missing))
        await self._work.contribute(other)

    def _check_contributors(self, frame: Frame) -> None:
        if not frame.contributors or frame.contributors & ~bits(self.group.trainers):
            raise ValueError("sent an average of nobody's data")

    def _take_message(self, sender: int, message: Message) -> None:
        agreement = self._agreement
        if isinstance(message, Status):
            agreement.hear_status(sender, message)
        elif isinstance(message, View):
            agreement.hear_view(sender, message)
        elif isinstance(message, Plan):
            agreement.hear_plan(sender, message)
        elif isinstance(message, Leave):
            self._suspect(sender, message.reason)
        elif isinstance(message, Want):
            for part in message.parts[: len(self._work.parts)]:
                self._work.give(sender, part)
        elif sender == agreement.coordinator or self._is_my_vote(message):
            agreement.hear_decision(message)
        self._advance()

    def _is_my_vote(self, message: Commit | Abort) -> bool:
        """Return whether others have agreed on what this member voted for."""
        return isinstance(message, Commit) and message.digest == self._work.vote

    def _vote_if_complete(self) -> None:
        if self._work.vote and self._voted_at is None:
            self._voted_at = time.monotonic()
            self._report()

    def _suspect(self, member: int, reason: str) -> None:
        if not self._over.done() and self._agreement.suspect(member, reason):
            self._report()

    def _report(self) -> None:
        if not self._over.done():
            self._agreement.report(parts=self._work.have, vote=self._work.vote)
            self._advance()

    def _advance(self) -> None:
        """Do what the latest news make possible."""
        agreement = self._agreement
        if self._over.done():
            return
        if agreement.accept_view() or agreement.coordinate(weigh=self._may_weigh()):
            self._enter_view()
        if agreement.plan is not None and agreement.plan.view > self._planned_view:
            self._planned_view = agreement.plan.view
            self._start(self._follow(agreement.plan))
        if self._over.done():
            return
        if agreement.decision is not None:
            self._over.set_result(agreement.decision)
        elif self.group.me in agreement.view.excluded:
            why = agreement.view.excluded[self.group.me]
            self._fail(f"the others have gone on without this peer: it {why}")
        elif agreement.coordinator is None:
            self._fail("nobody is left who can average")

    def _may_weigh(self) -> bool:
        """Return whether the oldest accusation is old enough to be weighed against others."""
        if not self._agreement.has_accusations:
            self._accused_at = None
            return False
        if self._accused_at is None:
            self._accused_at = time.monotonic()
        return time.monotonic() - self._accused_at >= _WEIGH

    def _enter_view(self) -> None:
        """Stop finishing parts, and say what is here once that is settled."""
        self._work.freeze(self._agreement.members)
        self._lines.drop(self._agreement.view.excluded)
        self._start(self._report_when_settled(self._agreement.view))

    async def _report_when_settled(self, view: View) -> None:
        await self._work.settle()
        if view is self._agreement.view:
            self._agreement.settled_view = view.number
            self._report()

    async def _follow(self, plan: Plan) -> None:
        """Go on after a change of members: fetch, or average anew, what is missing."""
        missing = await self._work.follow(plan)
        wanted: dict[int, list[int]] = {}
        for part in missing:
            # Two clients cannot talk to each other: the coordinator gets the part, too.
            holder = plan.holders[part]
            source = holder if self._lines.reaches(holder) else self._agreement.coordinator
            wanted.setdefault(holder if source is None else source, []).append(part)
        for source, parts in wanted.items():
            self._lines.say(source, Want(parts=parts))
        for reducer in sorted(set(plan.reducers.values())):
            self._start(self._work.contribute(reducer))
        await self._finish_ready()

    async def _finish_ready(self) -> None:
        await self._work.finish_ready()
        self._vote_if_complete()

    async def _watch(self) -> None:
        """Notice members that are silent, and that time is up."""
        stall, timeout = self._surroundings.stall, self._surroundings.timeout
        tick = min(_TICK, stall / 8)
        while not self._over.done():
            slept_at = time.monotonic()
            await asyncio.sleep(tick)
            slept = time.monotonic() - slept_at
            if slept > stall:
                self._fail(f"this peer was stopped for {slept:.0f} s")
            elif slept_at - self._began_at > timeout:
                self._fail(f"the exchange took more than {timeout:g} s")
            for member in self._lines.beat(min(slept, 2 * tick)):
                self._suspect(member, f"was silent for {stall:g} s")
            self._advance()

    def _fail(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_exception(ExchangeError(reason))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"unexpected error: {task.exception()!r}")
