"""The one subclass of hivemind's averager: its matchmaking, and an exchange that is exact."""

import asyncio
import contextlib
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2PDaemonError
from hivemind.utils import MPFuture, get_dht_time
from typing_extensions import override

from opendiloco.averaging.attempt import Attempt, AttemptReport
from opendiloco.averaging.codecs import CODECS
from opendiloco.averaging.exchange import Exchange, ExchangeError, Surroundings
from opendiloco.averaging.frames import TAG_BYTES, Frame, FrameKind
from opendiloco.averaging.group import Group, Member, Role
from opendiloco.averaging.lines import LinkLike
from opendiloco.averaging.links import MAX_STREAMS, Links
from opendiloco.averaging.messages import Commit, encode_message
from opendiloco.averaging.protocol import RoundPhase
from opendiloco.memory import give_back_memory
from opendiloco.units import Seconds

_PULSE = Seconds(0.5)
_MAX_PAYLOAD_BYTES = 2 << 20  # a part, or a message about all parts
_MAX_THREADS = 4
_DECISIONS_KEPT = 4

_ROLES = {
    AveragingMode.NODE.value: Role.FULL,
    AveragingMode.CLIENT.value: Role.CLIENT,
    AveragingMode.AUX.value: Role.AUXILIARY,
}


class RoundAverager(DecentralizedAverager):
    """Finds the peers of a round as hivemind does, and averages with them exactly.

    hivemind fixes the group key and the group size when the averager starts; here both are
    set before every round. hivemind's all-reduce leaves every peer with other bytes and hides
    failures; ours is :class:`opendiloco.averaging.exchange.Exchange`.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        dht: DHT,
        *,
        codec: str,
        stall: Seconds,
        observer: Callable[[RoundPhase], None] | None,
        **options: Any,  # noqa: ANN401 - hivemind's own options
    ) -> None:
        """Prepare; hivemind's `run_in_background` starts the process.

        Args:
            buffer: Flat float32 in shared memory; holds contribution, then average.
            dht: Where peers find each other.
            codec: Name of the codec.
            stall: A member that is silent for longer is excluded.
            observer: Runs in the averager's process as a round enters a phase.
            options: Of hivemind's averager.
        """
        self._buffer = buffer
        self._codec = CODECS[codec]
        self._stall = stall
        self._observer = observer
        self._replies, self._reply_end = mp.Pipe(duplex=False)
        self._pulse = mp.Value("d", time.monotonic())
        self._num_attempts = 0
        super().__init__([buffer], dht, start=False, allow_state_sharing=False, **options)

    # In the process of the peer.

    @property
    def silence(self) -> Seconds:
        """How long ago the averager's process showed that it runs."""
        return Seconds(time.monotonic() - self._pulse.value)

    @override
    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start the process, and have it accept links from other peers."""
        handler = signal.getsignal(signal.SIGINT)
        try:
            super().run_in_background(await_ready=False)
        finally:
            # hivemind: makes this process, and all its later children, deaf to Ctrl-C (1.1.12).
            signal.signal(signal.SIGINT, handler)
        if await_ready:
            self.wait_until_ready(timeout)
        self._outer_pipe.send(("_open", [], {}))

    def begin(self, attempt: Attempt) -> None:
        """Begin an attempt; :meth:`poll` gives its result."""
        self._num_attempts += 1
        self._outer_pipe.send(("_run_attempt", [self._num_attempts, attempt], {}))

    def poll(self, timeout: Seconds) -> AttemptReport | None:
        """Return the result of the latest attempt if it is there within this time."""
        deadline = time.monotonic() + timeout
        while self._replies.poll(max(0.0, deadline - time.monotonic())):
            number, report = self._replies.recv()
            if number == self._num_attempts:
                result: AttemptReport = report
                return result
        return None

    def cancel(self) -> None:
        """Give up the latest attempt."""
        self._outer_pipe.send(("_cancel_attempt", [self._num_attempts], {}))

    # In the averager's process.

    async def _open(self) -> None:
        torch.set_num_threads(1)  # the pool below has the threads
        self._executor = ThreadPoolExecutor(max(2, min(_MAX_THREADS, os.cpu_count() or 2)))
        self._exchange: Exchange | None = None
        self._exchange_opened = asyncio.Condition()
        self._decisions: dict[bytes, Commit] = {}
        self._attempt: tuple[int, asyncio.Task[Any]] | None = None
        self._links = Links(
            self._p2p,
            f"opendiloco/{self.prefix}/parts/2",
            receive=self._receive,
            lost=self._lose,
            max_payload_bytes=_MAX_PAYLOAD_BYTES,
            stall=self._stall,
        )
        if not self.client_mode:
            await self._links.listen()
        while True:
            self._pulse.value = time.monotonic()
            await asyncio.sleep(_PULSE)

    async def _run_attempt(self, number: int, attempt: Attempt) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        self._attempt = number, task
        began_at = time.monotonic()
        try:
            report = await self._take(attempt)
        except asyncio.CancelledError:
            report = AttemptReport(reason="given up")
        except Exception as error:  # noqa: BLE001 - the peer's process decides what to do
            report = AttemptReport(
                reason=str(error) or type(error).__name__,
                num_met=0 if self._exchange is None else len(self._exchange.group.members),
                dropped=self._dropped(),
                matchmaking=Seconds(time.monotonic() - began_at),
            )
        finally:
            self._exchange = None
            give_back_memory()
        self._reply_end.send((number, report))

    async def _cancel_attempt(self, number: int) -> None:
        if self._attempt is not None and self._attempt[0] == number:
            self._attempt[1].cancel()

    async def _take(self, attempt: Attempt) -> AttemptReport:
        """Find a group and average with it.

        Raises:
            ExchangeError: If there is no average.
        """
        began_at = time.monotonic()
        self._links.num_streams = MAX_STREAMS if len(attempt.neighbours) < 2 else 1
        for peer_id, is_client in attempt.neighbours:
            if self._opens_link_to(peer_id, is_client=is_client):
                self._links.warm(peer_id)
        self._observe(RoundPhase.MATCHMAKING)
        group = await self._find_group(attempt)
        matchmaking = Seconds(time.monotonic() - began_at)
        exchange = Exchange(
            group,
            self._buffer[: attempt.num_elements],
            self._codec,
            Surroundings(
                connect=self._connect_to(group),
                knock=self._knock_at(group),
                executor=self._executor,
                observe=self._observe,
                stall=self._stall,
                timeout=attempt.exchange,
            ),
        )
        async with self._exchange_opened:
            self._exchange = exchange
            self._exchange_opened.notify_all()
        report = await exchange.run()
        self._remember(exchange)
        return AttemptReport(
            num_met=len(group.members),
            contributors=tuple(group.members[index] for index in report.contributors),
            dropped=self._dropped(),
            matchmaking=matchmaking,
            exchange=report.exchange,
            commit=report.commit,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
        )

    def _remember(self, exchange: Exchange) -> None:
        """Keep how the exchange ended, for members that have not heard it."""
        if isinstance(exchange.decision, Commit):
            self._decisions[exchange.group.tag] = exchange.decision
        while len(self._decisions) > _DECISIONS_KEPT:
            del self._decisions[next(iter(self._decisions))]

    async def _find_group(self, attempt: Attempt) -> Group:
        matchmaking = self._matchmaking
        matchmaking.group_key_manager.group_bits = attempt.group_bits
        # hivemind: a target smaller than the group that a leader made raises while the next
        # key is drawn; None draws from the group's size instead (1.1.12).
        matchmaking.group_key_manager.target_group_size = None
        matchmaking.target_group_size = attempt.num_expected
        matchmaking.potential_leaders.target_group_size = attempt.num_expected
        now = get_dht_time()
        step = StepControl(
            scheduled_time=now + self.matchmaking_kwargs["min_matchmaking_time"],
            deadline=now + attempt.search,
            allow_retries=False,
            weight=attempt.weight,
            data_for_gather=self.serializer.dumps(
                [self.mode.value, attempt.weight, attempt.num_tokens]
            ),
        )
        step.attach(MPFuture(), MPFuture())  # hivemind: complains later without (1.1.12)
        step.allow_allreduce()
        found = await matchmaking.look_for_group(step)
        if found is None:
            raise ExchangeError("found nobody to average with")
        return self._group(found, num_peers=attempt.num_peers)

    def _group(self, found: GroupInfo, *, num_peers: int) -> Group:
        members = tuple(
            _member(str(peer_id), announced)
            for peer_id, announced in zip(
                found.peer_ids, map(self._read, found.gathered), strict=True
            )
        )
        num_trainers = sum(member.is_trainer and member.makes_sense for member in members)
        return Group(
            tag=found.group_id[:TAG_BYTES],
            members=members,
            me=found.peer_ids.index(self._p2p.peer_id),
            quorum=max(num_trainers, num_peers) // 2 + 1,
        )

    def _read(self, gathered: bytes) -> object:
        try:
            return self.serializer.loads(gathered)
        except Exception:  # noqa: BLE001 - whatever another peer's bytes do to the reader
            return None

    def _connect_to(self, group: Group) -> Callable[[int], Awaitable[LinkLike]]:
        def connect(index: int) -> Awaitable[LinkLike]:
            member = group.members[index]
            opens = self._opens_link_to(member.peer_id, is_client=not member.is_reducer)
            return self._links.connect(member.peer_id, opens=opens)

        return connect

    def _knock_at(self, group: Group) -> Callable[[int], Awaitable[None]]:
        async def knock(index: int) -> None:
            if group.members[index].is_reducer:  # a client does not listen; it opens links
                await self._links.knock(group.members[index].peer_id)

        return knock

    def _opens_link_to(self, peer_id: str, *, is_client: bool) -> bool:
        """Return which of the two opens the link: the client, else the smaller peer id."""
        return self.client_mode or (not is_client and str(self._p2p.peer_id) < peer_id)

    def _observe(self, phase: RoundPhase) -> None:
        if self._observer is not None:
            self._observer(phase)

    def _dropped(self) -> tuple[tuple[str, str], ...]:
        exchange = self._exchange
        return () if exchange is None else exchange.dropped

    async def _receive(self, peer_id: str, frame: Frame) -> None:
        exchange = self._exchange
        if exchange is None and frame.tag not in self._decisions:
            # Others can be here before the news that the group is complete.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stall), self._exchange_opened:
                    await self._exchange_opened.wait()
            exchange = self._exchange
        if exchange is not None and exchange.group.tag == frame.tag:
            await exchange.receive(peer_id, frame)
        elif frame.tag in self._decisions and frame.kind in {FrameKind.STATUS, FrameKind.VIEW}:
            link = self._links.get(peer_id)
            if link is not None:
                kind, payload = encode_message(self._decisions[frame.tag])
                link.post(Frame(kind, frame.tag, payload=payload))

    def _lose(self, peer_id: str, reason: str, *, may_return: bool) -> None:
        if self._exchange is not None:
            self._exchange.lose(peer_id, reason, may_return=may_return)

    @override
    async def _shutdown(self, timeout: float | None) -> None:
        self._links.close()
        # hivemind: raises in its own thread when p2pd is gone already (1.1.12).
        with contextlib.suppress(OSError, P2PDaemonError):
            await super()._shutdown(timeout)


def _member(peer_id: str, announced: object) -> Member:
    """Return a member from what it announced; one that makes no sense if that does not."""
    match announced:
        case [int(mode), float(weight), int(num_tokens)] if mode in _ROLES:
            return Member(peer_id, _ROLES[mode], weight, num_tokens)
    return Member(peer_id, Role.FULL, weight=float("nan"))
