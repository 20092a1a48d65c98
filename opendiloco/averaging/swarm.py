"""Averaging with other machines, through hivemind's averager."""

import math
import multiprocessing
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from hivemind import DHT
from hivemind.averaging.control import StepControl
from hivemind.utils import get_dht_time
from typing_extensions import override

from opendiloco.averaging.exact import RoundAverager
from opendiloco.averaging.options import CODECS, AveragingOptions
from opendiloco.averaging.protocol import Averager, RoundOutcome, RoundRequest, RoundResult
from opendiloco.errors import ConfigError, SwarmLostError
from opendiloco.outer import is_finite
from opendiloco.progress.view import SwarmView
from opendiloco.schedule import Readiness, RoundPolicy
from opendiloco.units import Seconds

_LARGEST_SHARE = 2.0**50  # weight or tokens that a peer may claim for one round
_VIEW_ELEMENTS = 1 << 20  # hivemind copies tensor by tensor: small views keep its memory low
_START = Seconds(30.0)
_ANSWER = Seconds(10.0)  # an averager process that takes longer to answer is stuck
_GOODBYE = Seconds(4.0)  # for an exchange under way when this peer is told to leave
_NEWS = Seconds(0.25)  # how often to look whether the others are ready


class Neighbours(Protocol):
    """Where the averager learns who else is there."""

    def view(self) -> SwarmView:
        """Return the latest picture of the other peers."""
        ...

    def refresh(self, timeout: Seconds) -> None:
        """Look again now; returns when the picture is new, or after ``timeout``."""
        ...


class _AttemptFailedError(Exception):
    """One exchange did not work; the buffer holds rubbish."""


class HivemindAverager(Averager):
    """One :class:`RoundAverager` per fragment, over one flat buffer each.

    Peers meet under a key made of the run, its fingerprint, the fragment and the outer
    step. Must be created in the main thread, before CUDA and other threads: hivemind forks.

    Attributes:
        step_under_way: hivemind's control of the latest exchange; None before the first.
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
    ) -> None:
        """Start the averagers.

        Args:
            dht: Where peers find each other.
            fragment_sizes: Number of elements of every fragment.
            neighbours: Who else is there.
            run_key: Peers with another one never meet; letters, digits, ``-`` and ``_``.
            options: Codec and patience.
            leaving: Once set, waiting and searching end at once, and an exchange soon.
        """
        self._leaving = leaving
        self._neighbours = neighbours
        self._options = options
        self._policy = RoundPolicy(wait=options.wait)
        self._buffers = [_shared_vector(size) for size in fragment_sizes]
        compression, self._element_bytes = CODECS[options.codec]
        self._averagers = [
            RoundAverager(
                torch.split(buffer, _VIEW_ELEMENTS),
                dht,
                prefix=f"{run_key}-f{fragment}",
                compression=compression(),
                min_matchmaking_time=options.matchmaking,
                request_timeout=options.matchmaking / 2,
                sender_timeout=options.stall,
                reducer_timeout=2 * options.stall,
                next_chunk_timeout=options.stall,
                allreduce_timeout=options.exchange,
                shutdown_timeout=2.0,
            )
            for fragment, buffer in enumerate(self._buffers)
        ]
        self._pending: Future[RoundResult] | None = None
        self._closed = False
        self.step_under_way: StepControl | None = None
        try:
            for averager in self._averagers:
                averager.run_in_background(timeout=_START)
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
        """The averagers' processes."""
        return tuple(self._averagers)

    def check(self) -> None:
        """Raise :class:`SwarmLostError` if an averager's process is dead."""
        if not all(averager.is_alive() for averager in self._averagers):
            raise SwarmLostError("the averager's process has died; start this peer again")

    @override
    def close(self) -> None:
        """See :meth:`opendiloco.averaging.protocol.Averager.close`."""
        if self._closed:
            return
        self._closed = True
        for averager in self._averagers:
            if averager.is_alive():
                averager.shutdown()
                averager.join(timeout=1.0)
            if averager.is_alive():
                averager.kill()

    def _resolve(self, future: Future[RoundResult], request: RoundRequest) -> None:
        try:
            future.set_result(self._run(request))
        except BaseException as error:  # noqa: BLE001 - the thread ends here; begin's caller raises it
            future.set_exception(error)

    @property
    def _is_ending(self) -> bool:
        return self._closed or self._leaving.is_set()

    def _run(self, request: RoundRequest) -> RoundResult:
        began_at = time.monotonic()
        deadline = began_at + request.timeout
        self._wait_for_others(request, deadline)
        waited = Seconds(time.monotonic() - began_at)
        reason = "out of time"
        attempts = 0
        while attempts < self._options.attempts and time.monotonic() < deadline:
            if self._is_ending:
                reason = "this peer leaves"
                break
            readiness, num_peers = self._policy.decide(
                self._neighbours.view(), outer_step=request.outer_step, waited=Seconds(math.inf)
            )
            if readiness is Readiness.BEHIND:
                reason = "others are at a later outer step"
                break
            if readiness is Readiness.ALONE:
                return self._alone(request, waited=waited, attempts=attempts)
            attempts += 1
            try:
                return self._attempt(request, num_peers, waited=waited, attempts=attempts)
            except _AttemptFailedError as error:
                reason = str(error)
                self._neighbours.refresh(_NEWS)
        return RoundResult(
            RoundOutcome.FAILED,
            wait=waited,
            matchmaking=Seconds(time.monotonic() - began_at - waited),
            attempts=attempts,
            reason=reason,
        )

    def _wait_for_others(self, request: RoundRequest, deadline: float) -> None:
        """Return when everybody is ready, nobody is there, or patience is used up."""
        began_at = time.monotonic()
        while time.monotonic() < deadline and not self._is_ending:
            self._neighbours.refresh(_NEWS)
            readiness, _ = self._policy.decide(
                self._neighbours.view(),
                outer_step=request.outer_step,
                waited=Seconds(time.monotonic() - began_at),
            )
            if readiness is not Readiness.WAIT:
                return
            time.sleep(_NEWS)

    def _alone(self, request: RoundRequest, *, waited: Seconds, attempts: int) -> RoundResult:
        buffer = self._buffers[request.fragment]
        request.fill(buffer)
        return RoundResult(
            RoundOutcome.ALONE,
            average=buffer,
            num_peers=1,
            total_weight=request.weight,
            num_tokens=request.num_tokens,
            wait=waited,
            attempts=attempts,
        )

    def _attempt(
        self, request: RoundRequest, num_peers: int, *, waited: Seconds, attempts: int
    ) -> RoundResult:
        """Run one exchange with the peers that are there.

        Raises:
            _AttemptFailedError: If it did not work; it may be tried again.
            SwarmLostError: If the averager's process is dead or stuck.
        """
        began_at = time.monotonic()
        averager, buffer = self._averagers[request.fragment], self._buffers[request.fragment]
        gathered = self._step(averager, buffer, request, num_peers)
        members = [m for m in map(_contribution, gathered.values()) if m is not None]
        if len(members) < len(gathered) or len(members) < 2:
            raise _AttemptFailedError("a peer announced a weight or tokens that make no sense")
        if 2 * len(members) <= num_peers:
            # The other half may have found each other, too, and both would commit.
            raise _AttemptFailedError(f"only {len(members)} of {num_peers} peers met")
        if not is_finite(buffer):
            raise _AttemptFailedError("the average has values that are not finite")
        wire = round(2 * (len(members) - 1) / len(members) * buffer.numel() * self._element_bytes)
        return RoundResult(
            RoundOutcome.AVERAGED,
            average=buffer,
            num_peers=len(members),
            total_weight=sum(weight for weight, _ in members),
            num_tokens=sum(num_tokens for _, num_tokens in members),
            wait=waited,
            matchmaking=Seconds(max(0.0, time.monotonic() - began_at - averager.exchange)),
            exchange=averager.exchange,
            bytes_sent=wire,
            bytes_received=wire,
            attempts=attempts,
        )

    def _step(
        self, averager: RoundAverager, buffer: torch.Tensor, request: RoundRequest, num_peers: int
    ) -> Mapping[Any, Any]:
        self.check()
        search = 2 * self._options.matchmaking + 1.0
        try:
            averager.address_round(request.outer_step, group_size=num_peers, timeout=_ANSWER)
            request.fill(buffer)
            control = averager.step(
                gather=[float(request.weight), int(request.num_tokens)],
                weight=float(request.weight),
                scheduled_time=get_dht_time() + self._options.matchmaking,
                timeout=search,
                allow_retries=False,
                wait=False,
            )
        except TimeoutError:
            raise SwarmLostError("the averager does not answer; start this peer again") from None
        self.step_under_way = control
        self._await(control, timeout=Seconds(search + self._options.exchange + _ANSWER))
        try:
            gathered: Mapping[Any, Any] = control.result(timeout=0)
        except Exception as error:  # noqa: BLE001 - hivemind hands over whatever went wrong
            raise _AttemptFailedError(str(error) or type(error).__name__) from None
        return gathered

    def _await(self, control: StepControl, *, timeout: Seconds) -> None:
        """Return when the step is done, well or not; give it up when this peer leaves."""
        done = threading.Event()
        control.add_done_callback(lambda _: done.set())
        deadline = time.monotonic() + timeout
        while not done.wait(_NEWS):
            self.check()
            if self._is_ending:
                # An exchange that has begun is finished: the others count on our part.
                if control.began_allreduce and done.wait(_GOODBYE):
                    return
                control.cancel()
                raise _AttemptFailedError("this peer leaves")
            if time.monotonic() > deadline:
                control.cancel()
                raise SwarmLostError("the averager is stuck; start this peer again")


def _contribution(data: object) -> tuple[float, int] | None:
    """Return weight and tokens that a peer announced, or None if they make no sense."""
    match data:
        case [float(weight), int(num_tokens)]:
            if 0 < weight <= _LARGEST_SHARE and 0 <= num_tokens <= _LARGEST_SHARE:
                return weight, num_tokens
    return None


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
