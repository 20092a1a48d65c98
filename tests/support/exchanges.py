"""Exchanges of several members in one event loop, over links that fail when the test says so."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from opendiloco.averaging.codecs import CODECS
from opendiloco.averaging.exchange import (
    Exchange,
    ExchangeError,
    ExchangeReport,
    Surroundings,
)
from opendiloco.averaging.frames import TAG_BYTES, Frame
from opendiloco.averaging.group import Group, Member, Role
from opendiloco.averaging.lines import LinkLike
from opendiloco.averaging.protocol import RoundPhase
from opendiloco.units import Seconds


@dataclass
class Cable:
    """What joins two members: whatever is sent arrives in order, until it is cut."""

    is_cut: bool = False
    is_stuck: bool = False
    delay: float = 0.0


class CableLink:
    """One member's end of a cable."""

    def __init__(self, hub: "Hub", me: int, other: int) -> None:
        self._hub = hub
        self._me, self._other = me, other
        self._queue: asyncio.Queue[Frame] = asyncio.Queue()
        self._room = asyncio.Semaphore(2)
        self.was_heard = True
        self.is_closed = False
        self._cable = hub.cable(me, other)
        self.task = asyncio.create_task(self._deliver())

    def post(self, frame: Frame) -> None:
        self._queue.put_nowait(frame)

    async def send(self, frame: Frame) -> None:
        await self._room.acquire()
        self.post(frame)

    def forget(self, tag: bytes) -> None:
        pass

    async def flush(self) -> None:
        while not self._queue.empty() and not self.is_closed:  # noqa: ASYNC110 - a queue tells nobody
            await asyncio.sleep(0)

    def close(self) -> None:
        self.is_closed = True
        if not self._cable.is_cut:
            self._hub.cut(self._me, self._other)

    def _is_stuck(self, cable: Cable) -> bool:
        return cable.is_stuck or bool({self._me, self._other} & self._hub.frozen)

    async def _deliver(self) -> None:
        cable = self._cable
        while True:
            frame = await self._queue.get()
            if frame.is_bulk:
                self._room.release()
            await asyncio.sleep(cable.delay)
            while self._is_stuck(cable):  # noqa: ASYNC110 - tests freeze members from anywhere
                await asyncio.sleep(0.01)
            if cable.is_cut:
                return
            self._hub.sent.append((self._me, self._other, frame))
            altered = self._hub.alter(self._me, self._other, frame)
            if altered is not None:
                await self._hub.arrive(self._me, self._other, altered)


def _unaltered(_sender: int, _receiver: int, frame: Frame) -> Frame | None:
    return frame


@dataclass
class Hub:
    """All cables of a group, and its exchanges."""

    num_members: int
    alter: Callable[[int, int, Frame], Frame | None] = _unaltered
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    links: dict[tuple[int, int], CableLink] = field(default_factory=dict)
    cables: dict[frozenset[int], Cable] = field(default_factory=dict)
    given_up: list[CableLink] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    sent: list[tuple[int, int, Frame]] = field(default_factory=list)

    def cable(self, one: int, other: int) -> Cable:
        return self.cables.setdefault(frozenset((one, other)), Cable())

    async def connect(self, me: int, other: int) -> LinkLike:
        if self.cable(me, other).is_cut:
            raise ConnectionRefusedError("there is nobody")
        if (me, other) not in self.links:
            self.links[me, other] = CableLink(self, me, other)
        return self.links[me, other]

    async def knock(self, me: int, other: int) -> None:
        if self.cable(me, other).is_cut:
            raise ConnectionRefusedError("there is nobody")

    async def arrive(self, sender: int, receiver: int, frame: Frame) -> None:
        exchange = self.exchanges.get(receiver)
        if exchange is None or receiver in self.dead:
            return
        link = self.links.get((receiver, sender))
        if link is not None:
            link.was_heard = True
        await exchange.receive(exchange.group.members[sender].peer_id, frame)

    def cut(self, one: int, other: int) -> None:
        """Both ends notice."""
        if self.cable(one, other).is_cut:
            return
        self.cable(one, other).is_cut = True
        self._tell_both(one, other)

    def reset(self, one: int, other: int) -> None:
        """What is under way between two members is lost, but they can connect anew."""
        if self.cable(one, other).is_cut:
            return
        self.cables.pop(frozenset((one, other))).is_cut = True
        for ends in ((one, other), (other, one)):
            link = self.links.pop(ends, None)
            if link is not None:
                self.given_up.append(link)
        self._tell_both(one, other)

    def _tell_both(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            exchange = self.exchanges.get(here)
            if exchange is not None and here not in self.dead:
                peer_id = exchange.group.members[there].peer_id
                exchange.lose(peer_id, "the connection is lost", may_return=True)

    def kill(self, member: int) -> None:
        """The member is gone, and all notice."""
        self.dead.add(member)
        for other in set(range(self.num_members)) - {member}:
            self.cut(member, other)


Outcome = ExchangeReport | ExchangeError


@dataclass
class Played:
    """What came of one exchange on all members."""

    outcomes: dict[int, Outcome]
    vectors: list[torch.Tensor]
    hub: Hub

    def reports(self) -> dict[int, ExchangeReport]:
        return {i: o for i, o in self.outcomes.items() if isinstance(o, ExchangeReport)}

    def errors(self) -> dict[int, str]:
        return {i: str(o) for i, o in self.outcomes.items() if isinstance(o, ExchangeError)}


def play(  # noqa: PLR0913 - every test names the few that matter to it
    vectors: Sequence[torch.Tensor],
    *,
    weights: Sequence[float] | None = None,
    roles: Sequence[Role] | None = None,
    codec: str = "none",
    stall: float = 1.0,
    timeout: float = 10.0,
    quorum: int | None = None,
    on_phase: Callable[[Hub, int, RoundPhase], None] | None = None,
    alter: Callable[[int, int, Frame], Frame | None] = _unaltered,
) -> Played:
    """Run one exchange; the vectors are copied.

    Args:
        vectors: Of every member.
        weights: Of every member; 1 if not given.
        roles: Of every member; full if not given.
        codec: Name of the codec.
        stall: Seconds.
        timeout: Seconds.
        quorum: Votes needed; more than half of the trainers if not given.
        on_phase: Hears of every member's phases; may cut cables.
        alter: Changes frames on their way; None loses them.
    """
    count = len(vectors)
    roles = roles or [Role.FULL] * count
    weights = weights or [1.0] * count
    members = tuple(
        Member(f"peer-{i}", roles[i], weight=float(weights[i]), num_tokens=10**i)
        for i in range(count)
    )
    num_trainers = sum(member.is_trainer for member in members)
    copies = [vector.clone() for vector in vectors]
    hub = Hub(count, alter)

    async def run() -> dict[int, Outcome]:
        tag = secrets.token_bytes(TAG_BYTES)
        with ThreadPoolExecutor(2) as executor:
            for i in range(count):
                hub.exchanges[i] = Exchange(
                    Group(tag, members, me=i, quorum=quorum or num_trainers // 2 + 1),
                    copies[i],
                    CODECS[codec],
                    Surroundings(
                        connect=lambda other, me=i: hub.connect(me, other),  # type: ignore[misc]
                        knock=lambda other, me=i: hub.knock(me, other),  # type: ignore[misc]
                        executor=executor,
                        observe=lambda phase, me=i: on_phase and on_phase(hub, me, phase),  # type: ignore[misc]
                        stall=Seconds(stall),
                        timeout=Seconds(timeout),
                    ),
                )
            tasks = {
                i: asyncio.create_task(exchange.run()) for i, exchange in hub.exchanges.items()
            }
            outcomes: dict[int, Outcome] = {}
            for i, task in tasks.items():
                try:
                    outcomes[i] = await asyncio.wait_for(task, timeout + 5.0)
                except ExchangeError as error:
                    outcomes[i] = error
            deliveries = [link.task for link in (*hub.links.values(), *hub.given_up)]
            for delivery in deliveries:
                delivery.cancel()
            await asyncio.gather(*deliveries, return_exceptions=True)
        return outcomes

    return Played(asyncio.run(run()), copies, hub)
