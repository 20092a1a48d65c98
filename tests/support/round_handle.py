"""The test's side of one peer of the fault tests: gives it orders, hears its answers."""

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from tests.support.round_peer import Settings

Event = dict[str, Any]

LONGEST_ROUND = 60.0
"""Seconds after which a round has hung."""

_ROOT = Path(__file__).parents[2]

SAY_GOODBYE = 10.0
"""Seconds that a process may take to end."""


class RoundPeer:
    """A ``tests.support.round_peer`` in a process of its own.

    Attributes:
        state: What it said last about its state.
        is_condemned: It has to be replaced, alive or not.
        num_unfinished: Rounds that it was ordered to hold and of whose end nobody has read.
    """

    def __init__(
        self,
        member: int,
        folder: Path,
        *,
        size: int,
        config: Mapping[str, object],
        launcher: Sequence[str] = (),
    ) -> None:
        """Start it; it has not joined yet.

        Args:
            member: Its number.
            folder: Where its files go; a new one for every peer.
            size: Elements of the vector.
            config: Settings of the peer, by group.
            launcher: A command that runs the command after it, for example on another host.
        """
        folder.mkdir(parents=True)
        report, its_report = os.pipe()
        its_answer, answer = os.pipe()
        self._report, self._answer = report, answer
        settings = Settings(member, size, str(folder), its_report, its_answer, dict(config))
        self._log = (folder / "stderr.txt").open("w+")
        self.process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "tests.support.round_peer", settings.encode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            pass_fds=(its_report, its_answer),
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )
        os.close(its_report)
        os.close(its_answer)
        assert self.process.stdout is not None
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout,), name=f"member-{member}", daemon=True
        )
        self._reader.start()
        self.member = member
        self.state: Event = {}
        self.is_condemned = False
        self.num_unfinished = 0
        self._ready: Event = {}
        self._last: Event = {}
        self._round: Event = {}

    @property
    def address(self) -> str:
        """The address by which others join."""
        return str(self._ready["address"])

    @property
    def averager_pid(self) -> int:
        """Its averager's process."""
        return int(self._ready["averager_pid"])

    @property
    def dht_pid(self) -> int:
        """Its DHT's process."""
        return int(self._ready["dht_pid"])

    @property
    def p2pd_pid(self) -> int:
        """Its p2pd."""
        (p2pd,) = (child for child in self.tree() if child.name() == "p2pd")
        return p2pd.pid

    def tree(self) -> list[psutil.Process]:
        """Return all its processes, the main one first."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    @property
    def is_fit(self) -> bool:
        """Whether it can take part in the next round, as far as is known."""
        return not (self.is_condemned or self.num_unfinished or self.process.poll() is not None)

    def order(self, do: str, **arguments: object) -> None:
        """Tell it what to do; it finishes first what it does."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        self.num_unfinished += do == "round"

    def wait_for(self, *names: str, within: float) -> Event:
        """Return its next event of one of these names."""
        deadline = time.monotonic() + within
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"member {self.member}: no {' or '.join(names)} within {within:g} s; "
                    f"{self._last_words()}"
                ) from None
            assert event is not None, (
                f"member {self.member} ended and said last {self._last}; {self._last_words()}"
            )
            self._last = _without_sample(event)
            if event["event"] == "round":
                self._round = event
            if event["event"] == "ended":
                # Who caught up after a round reports no result, but its log says how it went.
                event |= {name: self._round.get(name) for name in ("reason", "dropped")}
                self._round = {}
            if event["event"] in {"ready", "ended"}:
                self.state = event
            self.num_unfinished -= event["event"] == "ended"
            if event["event"] == "ready":
                self._ready = event
            if event["event"] in names:
                return event

    def wait_until_it_halts(self, phase: str) -> None:
        """Return when it stands still in the phase for which it was ordered to."""
        readable, _, _ = select.select([self._report], [], [], LONGEST_ROUND)
        said = os.read(self._report, 64).decode().strip() if readable else "nothing"
        assert said == phase, (
            f"member {self.member} did not halt at {phase}, but said {said}; {self._heard()}"
        )

    def go_on(self) -> None:
        """Let it go on from where it halts; harmless if it is dead."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._answer, b"!")

    def end(self, *, kill: bool = True) -> None:
        """End it with all its processes: at once, or by giving it no more orders."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.0 if kill else SAY_GOODBYE)
        if self.process.poll() is None:
            for process in self.tree():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(SAY_GOODBYE)
        self._reader.join(SAY_GOODBYE)
        self.process.stdout.close()
        self._log.close()
        for end in (self._report, self._answer):
            os.close(end)

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _heard(self) -> list[Event]:
        """Return the events that nobody has read."""
        return [_without_sample(event) for event in list(self._events.queue) if event is not None]

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]


def _without_sample(event: Event) -> Event:
    """Return the event as a message can show it."""
    return {name: value for name, value in event.items() if name != "momentum"}
