"""Faults that hit a peer in a given phase of a round, and the proof that they did."""

import contextlib
import enum
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from tests.support.round_handle import RoundPeer
from tests.support.swarm import wait_until

_ENDED = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


class When(enum.Enum):
    """The phase of a round in which a fault happens."""

    MATCHMAKING = "matchmaking"
    FIRST_PART = "first part"
    EXCHANGE = "mid exchange"
    COMMIT = "commit"
    OUTER_STEP = "outer step"


class Who(enum.Enum):
    """What a fault hits: a peer with all its processes, or one of them."""

    PEER = "peer"
    AVERAGER = "averager"
    P2PD = "p2pd"
    DHT = "DHT"

    def processes(self, victim: RoundPeer) -> list[psutil.Process]:
        """Return the processes that it stands for."""
        match self:
            case Who.PEER:
                return victim.tree()
            case Who.AVERAGER:
                return [psutil.Process(victim.averager_pid)]
            case Who.P2PD:
                return [psutil.Process(victim.p2pd_pid)]
            case Who.DHT:
                return [psutil.Process(victim.dht_pid)]


@dataclass
class Fault:
    """A signal to a peer in one phase of a round.

    Attributes:
        what: SIGKILL or SIGSTOP.
        who: Which of its processes it goes to.
        when: In which phase of the round.
        pause: Seconds after which what was stopped goes on, in a thread; None for never.
        fired: Whether it was seen to work: its processes were gone, or stood still.
    """

    what: signal.Signals
    who: Who
    when: When
    pause: float | None = None
    fired: bool = False

    def strike(self, victim: RoundPeer) -> None:
        """Send the signal, and wait for its effect."""
        processes = self.who.processes(victim)
        send(processes, self.what)
        effect = _has_ended if self.what is signal.SIGKILL else _stands_still
        wait_until(
            lambda: all(effect(process) for process in processes),
            f"{self.what.name} takes effect on the {self.who.value}",
            within=5.0,
        )
        self.fired = True
        if self.pause is not None:
            threading.Timer(self.pause, send, (processes, signal.SIGCONT)).start()

    def thaw(self, victim: RoundPeer) -> None:
        """Let what was stopped go on."""
        send(self.who.processes(victim), signal.SIGCONT)


@dataclass
class Thaw:
    """The end of a freeze, when another peer reaches a phase.

    Attributes:
        freeze: What it undoes.
        frozen: Who is frozen.
        when: In which phase of the other peer's round.
        fired: Whether the frozen peer's processes went on.
    """

    freeze: Fault
    frozen: RoundPeer
    when: When
    fired: bool = False

    def strike(self, victim: RoundPeer) -> None:
        """Let the frozen peer go on, whoever has reached the phase."""
        assert victim is not self.frozen
        self.freeze.thaw(self.frozen)
        wait_until(
            lambda: not any(map(_stands_still, self.freeze.who.processes(self.frozen))),
            "the frozen peer goes on",
            within=5.0,
        )
        self.fired = True


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Signal processes, some of which may end with the first ones."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() in _ENDED
    except psutil.NoSuchProcess:
        return True


def _stands_still(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED
