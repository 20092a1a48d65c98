"""A peer of the fault tests: a real seat in a real swarm, whose training adds a known vector.

Started as ``python -m tests.support.round_peer SETTINGS``, with :class:`Settings` as JSON.
It reads orders, a JSON object a line, and answers in the same way: with every event of its
log, and with

``imported``  once it can take orders
``ready``     it has joined: its address, the processes behind it, its state
``trained``   before a round: what it contributes, ``scale`` times its vector, and its weight
``ended``     after a round: what came of it, and its state
``lost``      its swarm side is gone; it ends with that error's exit code
``met``       it sees as many peers in its own state as it should

The orders are ``{"do": "join", "initial_peers": [...]}``, ``{"do": "meet", "num_peers": n}``
and ``{"do": "round", "halt_at": phase}``. In the phase at which it shall halt it writes a line
to ``report_fd`` and goes on when it can read a byte from ``answer_fd``. It leaves when there
are no more orders.
"""

import functools
import json
import multiprocessing
import os
import select
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from typing_extensions import override

from opendiloco.averaging.protocol import RoundPhase, RoundRequest, RoundResult
from opendiloco.averaging.swarm import HivemindAverager
from opendiloco.diloco import OuterReport, Verdict
from opendiloco.errors import SwarmLostError
from opendiloco.events import EventLog
from opendiloco.identity import load_or_create_identity
from opendiloco.leaving import Leaving
from opendiloco.schedule import SwarmEvent
from opendiloco.tensors import Layout
from opendiloco.units import Seconds
from peers import connection as peer_connection
from peers.config import PeerConfig
from peers.inner import InnerReport
from peers.swarm import Seat
from peers.terms import shared_terms

OUTER_STEP = "outer step"
"""The phase between a round's result and its application."""

PHASES = (*(phase.value for phase in RoundPhase), OUTER_STEP)
SAMPLE_STRIDE = 10_007
"""Every so many elements one is reported."""

_LONGEST_HALT = 5.0  # seconds
_TELLING = threading.Lock()


@dataclass(frozen=True)
class Settings:
    """What a peer is told on its command line.

    Attributes:
        member: Number of the peer, from 0; its vector and weight follow from it.
        size: Elements of the vector.
        out_dir: Its folder.
        report_fd: Where it says that it has halted.
        answer_fd: Where it is told to go on.
        config: Settings of the peer by group, on top of those that have one inner step a round.
    """

    member: int
    size: int
    out_dir: str
    report_fd: int
    answer_fd: int
    config: dict[str, object]

    def encode(self) -> str:
        """Return them as JSON."""
        return json.dumps(asdict(self))


def base_vector(member: int, size: int) -> torch.Tensor:
    """Return what a member's training moves along, float32, of size 0.01."""
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 + member)).mul_(0.01)


def tokens_of(member: int) -> int:
    """Return the tokens of a member's inner step; no two sets of members have the same sum."""
    return (100, 310, 930, 2770)[member]


def step_scale(member: int, number: int) -> float:
    """Return how far a member's inner step goes; that of every round is another one."""
    return 0.5 + (37 * number + 11 * member) % 32 / 32


def tell(event: str, **fields: object) -> None:
    """Answer with one line."""
    with _TELLING:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


class Gate:
    """Halts in one phase of a round until the harness has done what it wants to do then."""

    def __init__(self, report_fd: int, answer_fd: int) -> None:
        self._report_fd = report_fd
        self._answer_fd = answer_fd
        # Shared with the averager's process; without a lock, which a killed process would keep.
        self._halt_at = multiprocessing.RawValue("i", -1)
        os.set_blocking(answer_fd, False)

    def arm(self, phase: str | None) -> None:
        """Halt once, when this phase is next reached; or never."""
        while select.select([self._answer_fd], [], [], 0)[0]:
            os.read(self._answer_fd, 64)
        self._halt_at.value = -1 if phase is None else PHASES.index(phase)

    def reach(self, phase: str) -> None:
        """Halt if this is the phase; in whichever process the phase is reached."""
        if self._halt_at.value != PHASES.index(phase):
            return
        self._halt_at.value = -1
        os.write(self._report_fd, f"{phase}\n".encode())
        if select.select([self._answer_fd], [], [], _LONGEST_HALT)[0]:
            os.read(self._answer_fd, 1)


class GatedAverager(HivemindAverager):
    """Passes the gate in every phase."""

    def __init__(self, *arguments: object, gate: Gate, **options: object) -> None:
        self._gate = gate

        def observe(phase: RoundPhase) -> None:
            gate.reach(phase.value)

        super().__init__(*arguments, observer=observe, **options)  # type: ignore[arg-type]

    @override
    def begin(self, request: RoundRequest) -> Future[RoundResult]:
        handed_over: Future[RoundResult] = Future()

        def hand_over(done: Future[RoundResult]) -> None:
            self._gate.reach(OUTER_STEP)
            error = done.exception()
            if error is None:
                handed_over.set_result(done.result())
            else:
                handed_over.set_exception(error)

        super().begin(request).add_done_callback(hand_over)
        return handed_over


class Member:
    """The peer, once it has joined."""

    def __init__(self, settings: Settings, config: PeerConfig, gate: Gate) -> None:
        self._settings = settings
        self._gate = gate
        self._layout = Layout.of({"weight": (settings.size,)})
        self._base = base_vector(settings.member, settings.size)
        self._model = torch.zeros(settings.size)
        self._scale = 0.0
        self._num_rounds = 0
        leaving = Leaving()
        leaving.install()
        log = EventLog(None, listener=lambda event: tell(**event))  # type: ignore[arg-type]
        self.connection = peer_connection.Connection(
            config,
            self._layout,
            load_or_create_identity(Path(settings.out_dir) / "identity.key"),
            terms=shared_terms(config, self._layout, model="-", tokenizer="-"),
            log=log,
            leaving=leaving,
        )
        self._seat = Seat(config, self._layout, self.connection, log=log)
        self._model.copy_(self._seat.join(lambda: {"weight": self._model})["weight"])
        leaving.settle()
        tell(
            "ready",
            address=self.connection.dht.addresses()[0],
            averager_pid=self.connection.averager.processes[0].pid,
            dht_pid=self.connection.dht.dht.pid,
            **self._state(),
        )

    def take_part(self, halt_at: str | None) -> None:
        """Take one inner step, then part in a round."""
        scale = step_scale(self._settings.member, self._num_rounds)
        self._num_rounds += 1
        self._model.add_(self._base, alpha=scale)
        self._scale += scale
        num_tokens = tokens_of(self._settings.member)
        self._seat.count(InnerReport(1, num_tokens, 1.0, 1.0, 1e-3, Seconds(1.0)))
        tell("trained", scale=self._scale, weight=self._seat.diloco.num_tokens)
        self._gate.arm(halt_at)
        began_at = time.monotonic()
        report = self._hold_round()
        seconds = time.monotonic() - began_at
        if report.parameters is not None:
            self._model.copy_(report.parameters["weight"])
        if report.verdict in {Verdict.COMMITTED, Verdict.DISCARDED}:
            self._scale = 0.0
        result = report.round
        tell(
            "ended",
            verdict=report.verdict.value,
            outcome=result.outcome.value if result else None,
            num_peers=result.num_peers if result else None,
            total_weight=result.total_weight if result else None,
            attempts=result.attempts if result else None,
            reason=result.reason if result else None,
            seconds=seconds,
            **self._state(),
        )

    def meet(self, num_peers: int) -> None:
        """Return when so many peers, this one included, are seen to train from its state."""
        tracker, outer_step = self.connection.tracker, self._seat.diloco.state.outer_step
        while len(tracker.view().coming_to(outer_step)) < num_peers - 1:
            tracker.refresh(Seconds(1.0))
        tell("met")

    def _hold_round(self) -> OuterReport:
        local = {"weight": self._model}
        report = self._seat.handle(SwarmEvent.BEGIN_ROUND, local)
        report = report or self._seat.handle(SwarmEvent.FINISH_ROUND, local)
        assert report is not None
        return report

    def _state(self) -> dict[str, object]:
        state = self._seat.diloco.state
        return {
            "outer_step": state.outer_step,
            "digest": state.digest,
            "momentum": state.fragments[0].momentum[::SAMPLE_STRIDE].tolist(),
        }


def make_config(settings: Settings, initial_peers: list[str]) -> PeerConfig:
    """Return the settings of the peer, with a round after every inner step."""
    groups: dict[str, object] = {
        "diloco": {"inner_steps": 1},
        "network": {"host": "127.0.0.1"},
        **settings.config,
    }
    way_in = {"initial_peers": initial_peers} if initial_peers else {"new_swarm": True}
    return PeerConfig.model_validate(
        {
            "run_id": "faults",
            "name": f"member-{settings.member}",
            "out_dir": settings.out_dir,
            **way_in,
            **groups,
        }
    )


def main() -> int:
    """Do as ordered; returns the exit code."""
    torch.set_num_threads(1)
    settings = Settings(**json.loads(sys.argv[1]))
    gate = Gate(settings.report_fd, settings.answer_fd)
    peer_connection.HivemindAverager = functools.partial(GatedAverager, gate=gate)  # type: ignore[attr-defined, assignment]
    tell("imported")
    member: Member | None = None
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "join":
                member = Member(settings, make_config(settings, order["initial_peers"]), gate)
            elif member is not None and order["do"] == "meet":
                member.meet(order["num_peers"])
            elif member is not None:
                member.take_part(order["halt_at"])
    except SwarmLostError as error:
        tell("lost", reason=str(error))
        return error.exit_code
    finally:
        if member is not None:
            member.connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
