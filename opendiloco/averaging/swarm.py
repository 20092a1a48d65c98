"""Averaging with other machines, through hivemind's averager."""

import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from hivemind import DHT
from typing_extensions import override

from opendiloco.averaging.attempt import Attempt, AttemptReport, Attempts
from opendiloco.averaging.exact import RoundAverager
from opendiloco.averaging.options import AveragingOptions
from opendiloco.averaging.protocol import (
    ABSURD,
    Averager,
    RoundOutcome,
    RoundPhase,
    RoundRequest,
    RoundResult,
)
from opendiloco.errors import ConfigError, SwarmLostError
from opendiloco.memory import give_back_memory
from opendiloco.outer import is_sound
from opendiloco.processes import how_ended
from opendiloco.progress.view import SwarmView
from opendiloco.schedule import Readiness, RoundPolicy
from opendiloco.units import Seconds

_START = Seconds(30.0)
_ANSWER = Seconds(10.0)  # for an attempt to end beyond its time
_PULSELESS = Seconds(6.0)  # an averager process that is silent for longer is stuck
_DOUBT = Seconds(2.0)  # for it to show that the whole peer was stopped, not it alone
_GOODBYE = Seconds(4.0)  # for an exchange under way when this peer is told to leave
_NEWS = Seconds(0.25)  # how often to look whether the others are ready, in the beginning
_SELDOM = Seconds(2.0)  # and after a while


class Neighbours(Protocol):
    """Where the averager learns who it is and who else is there."""

    @property
    def peer_id(self) -> str:
        """This peer."""
        ...

    def view(self) -> SwarmView:
        """Return the latest picture of the other peers."""
        ...

    def refresh(self, timeout: Seconds) -> None:
        """Look again now; returns when the picture is new, or after ``timeout``."""
        ...

    def met(self, peer_ids: Iterable[str]) -> None:
        """Take note that these peers were there just now."""
        ...


class HivemindAverager(Averager):
    """One :class:`RoundAverager` over one flat buffer, which all fragments use in turn.

    Peers meet under a key made of the run, its fingerprint, the codec, the outer step and
    the state they start from. Must be created in the main thread, before CUDA and other
    threads: hivemind forks.
    """

    def __init__(
        self,
        dht: DHT,
        fragment_sizes: Sequence[int],
        neighbours: Neighbours,
        *,
        run_key: str,
        options: AveragingOptions,
        leaving: threading.Event,
        observer: Callable[[RoundPhase], None] | None = None,
    ) -> None:
        """Start the averager's process.

        Args:
            dht: Where peers find each other.
            fragment_sizes: Number of elements of every fragment.
            neighbours: Who else is there.
            run_key: Peers with another one never meet; letters, digits, ``-`` and ``_``.
            options: Codec and patience.
            leaving: Once set, waiting and searching end at once, and an exchange soon.
            observer: Runs in the averager's process as a round enters a phase.
        """
        self._leaving = leaving
        self._neighbours = neighbours
        self._options = options
        self._policy = RoundPolicy(wait=options.wait)
        self._fragment_sizes = tuple(fragment_sizes)
        self._buffer = _shared_vector(max(fragment_sizes))
        self._averager = RoundAverager(
            self._buffer,
            dht,
            codec=options.codec,
            stall=options.stall,
            observer=observer,
            prefix=f"{run_key}-{options.codec}",
            auxiliary=options.auxiliary,
            min_matchmaking_time=options.matchmaking,
            request_timeout=options.matchmaking / 2,
            shutdown_timeout=2.0,
        )
        self._pending: Future[RoundResult] | None = None
        self._closed = False
        self._doubted_at: float | None = None
        try:
            self._averager.run_in_background(timeout=_START)
        except TimeoutError:
            self.close()
            raise SwarmLostError(
                f"the averager was not ready within {_START:g} s; this machine may be overloaded"
            ) from None

    @override
    def begin(self, request: RoundRequest) -> Future[RoundResult]:
        """See :meth:`opendiloco.averaging.protocol.Averager.begin`.

        The future raises :class:`SwarmLostError` when the averager's process is dead or stuck.
        """
        if self._pending is not None and not self._pending.done():
            raise RuntimeError("the previous round is not finished")
        self._pending = Future()
        # A daemon: hivemind has calls without a timeout, and none may keep the process alive.
        threading.Thread(
            target=self._resolve, args=(self._pending, request), name="round", daemon=True
        ).start()
        return self._pending

    @property
    def processes(self) -> tuple[multiprocessing.Process, ...]:
        """The averager's process."""
        return (self._averager,)

    def check(self) -> None:
        """Raise :class:`SwarmLostError` if the averager's process is dead or stuck."""
        how = how_ended(self._averager)
        if how:
            raise SwarmLostError(f"the averager's process has ended ({how}); start this peer again")
        moment = time.monotonic()
        if self._averager.silence <= _PULSELESS:
            self._doubted_at = None
        elif self._doubted_at is None:
            self._doubted_at = moment
        elif moment - self._doubted_at > _DOUBT:
            raise SwarmLostError("the averager's process does not answer; start this peer again")

    @override
    def close(self) -> None:
        """See :meth:`opendiloco.averaging.protocol.Averager.close`."""
        if self._closed:
            return
        self._closed = True
        if self._averager.is_alive():
            self._averager.shutdown()
            self._averager.join(timeout=1.0)
        if self._averager.is_alive():
            self._averager.kill()
            self._averager.join(timeout=1.0)

    def _resolve(self, future: Future[RoundResult], request: RoundRequest) -> None:
        try:
            result = self._run(request)
            give_back_memory()
            future.set_result(result)
        except BaseException as error:  # noqa: BLE001 - the thread ends here; begin's caller raises it
            future.set_exception(error)

    @property
    def _is_ending(self) -> bool:
        return self._closed or self._leaving.is_set()

    def _run(self, request: RoundRequest) -> RoundResult:
        began_at = time.monotonic()
        deadline = began_at + request.timeout
        self._wait_for_others(request, deadline)
        attempts = Attempts(waited=Seconds(time.monotonic() - began_at))
        while attempts.num_serious < self._options.attempts and time.monotonic() < deadline:
            if self._is_ending:
                attempts.reasons.append("this peer leaves")
                break
            readiness, num_peers = self._decide(request, waited=Seconds(math.inf))
            if readiness is Readiness.BEHIND:
                attempts.reasons.append("others are at a later outer step")
                break
            average = self._buffer[: self._fragment_sizes[request.fragment]]
            request.fill(average)
            if not is_sound(average):
                attempts.reasons.append(ABSURD)
                break
            if readiness is Readiness.ALONE:
                return attempts.result(
                    RoundOutcome.ALONE,
                    average=average,
                    contributors={self._neighbours.peer_id: request.weight},
                    num_tokens=request.num_tokens,
                )
            result = self._attempt(request, num_peers, average, attempts)
            if result is not None:
                return result
            self._neighbours.refresh(_NEWS)
        return attempts.result(RoundOutcome.FAILED)

    def _decide(self, request: RoundRequest, *, waited: Seconds) -> tuple[Readiness, int]:
        return self._policy.decide(
            self._neighbours.view(),
            outer_step=request.outer_step,
            waited=waited,
            lineage=request.lineage,
        )

    def _wait_for_others(self, request: RoundRequest, deadline: float) -> None:
        """Return when everybody is ready, nobody is there, or patience is used up."""
        began_at = time.monotonic()
        while time.monotonic() < deadline and not self._is_ending:
            self._neighbours.refresh(_NEWS)
            readiness, _ = self._decide(request, waited=Seconds(time.monotonic() - began_at))
            if readiness is not Readiness.WAIT:
                return
            # Looking costs every peer's DHT some work: the longer it takes, the less often.
            time.sleep(max(_NEWS, min(_SELDOM, (time.monotonic() - began_at) / 10)))

    def _attempt(
        self, request: RoundRequest, num_peers: int, average: torch.Tensor, attempts: Attempts
    ) -> RoundResult | None:
        """Search for the others and average with them once.

        Returns:
            The result; None if it did not work, and may be tried again.

        Raises:
            SwarmLostError: If the averager's process is dead or stuck.
        """
        self.check()
        ready = self._neighbours.view().ready_at(request.outer_step, request.lineage)
        present = [peer for peer in ready if peer.peer_id not in attempts.dropped]
        report = self._await(
            Attempt(
                outer_step=request.outer_step,
                lineage=request.lineage,
                num_elements=average.numel(),
                weight=float(request.weight),
                num_tokens=int(request.num_tokens),
                num_expected=max(2, 1 + len(present)),
                num_peers=num_peers,
                neighbours=tuple((peer.peer_id, peer.client_mode) for peer in ready),
                search=Seconds(2 * self._options.matchmaking + 1.0),
                exchange=self._options.exchange,
            )
        )
        attempts.add(report, num_peers=num_peers)
        if report.reason:
            return None
        self._neighbours.met(member.peer_id for member in report.contributors)
        return attempts.result(
            RoundOutcome.AVERAGED,
            average=None if self._options.auxiliary else average,
            contributors={member.peer_id: member.weight for member in report.contributors},
            num_tokens=sum(member.num_tokens for member in report.contributors),
        )

    def _await(self, attempt: Attempt) -> AttemptReport:
        """Have the attempt made; gives it up when this peer leaves."""
        self._averager.begin(attempt)
        patience = attempt.search + attempt.exchange + _ANSWER
        deadline = give_up_at = time.monotonic() + patience
        cancelled = False
        while (report := self._averager.poll(_NEWS)) is None:
            self.check()
            if self._is_ending and not cancelled:
                # An exchange that has begun may still end well: the others count on our part.
                give_up_at = min(give_up_at, time.monotonic() + _GOODBYE)
            if time.monotonic() > give_up_at and not cancelled:
                self._averager.cancel()
                cancelled = True
            if time.monotonic() > deadline + _ANSWER:
                raise SwarmLostError("the averager is stuck; start this peer again")
        return report


def _shared_vector(size: int) -> torch.Tensor:
    """Return a float32 vector that forked processes share.

    Raises:
        ConfigError: If /dev/shm is too small.
    """
    try:
        vector = torch.zeros(size, dtype=torch.float32)
        vector.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigError(
            f"shared memory cannot hold {4 * size / 2**20:.0f} MiB for averaging ({error}); "
            "give the container more, for example with --shm-size=8g"
        ) from None
    return vector
