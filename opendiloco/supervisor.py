"""Watches processes that training depends on: notices within seconds that one died or froze."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from opendiloco.errors import SwarmLostError
from opendiloco.units import Seconds

_TICK = Seconds(0.5)
_GRACE = Seconds(1.0)


@dataclass(frozen=True)
class Watched:
    """A process, and how to find out whether it works.

    Attributes:
        name: For messages.
        ended: Says how it ended; empty while it runs. Must not block.
        ask: Returns when it has answered; raises :class:`SwarmLostError` when it has not.
        patience: It is lost when it has not answered for so long.
        is_final: Whether it is lost as soon as ``ask`` raises, which is patient itself then.
    """

    name: str
    ended: Callable[[], str]
    ask: Callable[[], None]
    patience: Seconds
    is_final: bool = False


class Alarm(threading.Event):
    """Set when a process is lost, and also when this peer is told to leave.

    One flag for all waits that must end then. Ask it; it cannot be waited for.

    Attributes:
        reason: What was lost first; empty while nothing is.
    """

    def __init__(self, leaving: threading.Event) -> None:
        super().__init__()
        self.reason = ""
        self._leaving = leaving
        self._declaring = threading.Lock()

    @override
    def is_set(self) -> bool:
        return super().is_set() or self._leaving.is_set()

    def declare(self, reason: str) -> bool:
        """Say that something is lost; returns whether this is news."""
        with self._declaring:
            is_news = not self.reason
            self.reason = self.reason or reason
        self.set()
        return is_news

    def check(self) -> None:
        """Raise :class:`SwarmLostError` if something is lost."""
        if self.reason:
            raise SwarmLostError(self.reason)


class Watch:
    """Threads that ask every process again and again, and one that judges the answers.

    A question that never returns blocks only its own thread. Silence is counted in ticks of
    the judge: while this process itself does not run, frozen or on an overloaded machine,
    nobody's silence grows by more than one.
    """

    def __init__(
        self,
        processes: Sequence[Watched],
        *,
        alarm: Alarm,
        on_loss: Callable[[str], None],
        tick: Seconds = _TICK,
    ) -> None:
        """Prepare; :meth:`start` begins to ask.

        Args:
            processes: Those whose end takes others with it first.
            alarm: Told what is lost.
            on_loss: Told once, too, from the judge's thread.
            tick: Time between two looks.
        """
        self._alarm = alarm
        self._on_loss = on_loss
        self._tick = tick
        self._closing = threading.Event()
        self._posts = [_Post(process, tick) for process in processes]
        self._threads = [
            threading.Thread(
                target=post.run, args=(self._closing,), name=f"ask {post.process.name}", daemon=True
            )
            for post in self._posts
        ]
        self._threads.append(threading.Thread(target=self._judge, name="watch", daemon=True))

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop; a question that is stuck is left to itself. Safe to call twice."""
        self._closing.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_GRACE)

    def _judge(self) -> None:
        while not self._closing.wait(self._tick):
            for post in self._posts:
                reason = post.judge()
                if reason and not self._closing.is_set():
                    if self._alarm.declare(reason):
                        self._on_loss(reason)
                    return


class _Post:
    """One process and how it has answered so far."""

    def __init__(self, process: Watched, tick: Seconds) -> None:
        self.process = process
        self._tick = tick
        self._num_silent_ticks = 0
        self._is_given_up = False

    def run(self, closing: threading.Event) -> None:
        """Ask until told to stop, or the process has ended."""
        while not closing.wait(self._tick):
            try:
                self.process.ask()
            except SwarmLostError:
                self._is_given_up = self.process.is_final
                continue
            self._num_silent_ticks = 0

    def judge(self) -> str:
        """Count one tick; return how the process is lost, or nothing."""
        how = self.process.ended()
        if how:
            return f"{self.process.name} has ended ({how})"
        self._num_silent_ticks += 1
        is_silent = self._num_silent_ticks * self._tick > self.process.patience
        if is_silent or self._is_given_up:
            return f"{self.process.name} does not answer"
        return ""
