"""Peers as real processes: start them, follow their events, and make sure that they end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.swarm import wait_until

Event = dict[str, object]

SMALL = [
    "--model.preset=2m",
    "--data.seq-len=32",
    "--inner.batch-size=4",
    "--inner.micro-batch-size=4",
    "--inner.warmup-steps=10",
    "--inner.lr=2e-3",
    "--diloco.inner-steps=10",
    "--network.host=127.0.0.1",
    "--network.heartbeat-s=0.5",
    "--network.peer-timeout-s=3",
    "--averaging.matchmaking-s=3",
    "--log-every=5",
]
"""Settings with which an inner step takes milliseconds."""


class PeerProcess:
    """One ``python -m peers`` and what it left behind."""

    def __init__(self, out_dir: Path, arguments: Sequence[str], env: dict[str, str]) -> None:
        self.out_dir = out_dir
        out_dir.mkdir(parents=True, exist_ok=True)
        self._stderr = (out_dir / "stderr.txt").open("w+")
        self._stdout = (out_dir / "stdout.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "peers", f"--out-dir={out_dir}", *arguments],
            stdout=self._stdout,
            stderr=self._stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        )

    @property
    def stderr(self) -> str:
        return (self.out_dir / "stderr.txt").read_text()

    @property
    def stdout(self) -> str:
        return (self.out_dir / "stdout.txt").read_text()

    def events(self, name: str | None = None) -> list[Event]:
        """Return the events so far, all or those of one name; a half line is left out."""
        path = self.out_dir / "events.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        events: list[Event] = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if name is None or event["event"] == name]

    def wait_for(self, name: str, *, count: int = 1, within: float = 60.0) -> Event:
        """Wait until an event has happened ``count`` times; returns that one."""
        wait_until(
            lambda: len(self.events(name)) >= count or self.process.poll() is not None,
            f"{self.out_dir.name} emits {name}",
            within=within,
        )
        found = self.events(name)
        assert len(found) >= count, f"{self.out_dir.name} ended early: {self.stderr[-2000:]}"
        return found[count - 1]

    def address(self) -> str:
        """Return the address by which others join."""
        return str(self.wait_for("started")["addresses"]).split()[0]

    def tree(self) -> list[psutil.Process]:
        """Return the process and all that descend from it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, within: float = 60.0) -> int:
        """Return the exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.out_dir.name} still runs after {within:g} s; {self.stdout[-2000:]}"
            ) from None

    def end(self) -> None:
        """Kill what still runs, and close the files."""
        if self.process.poll() is None:
            for process in self.tree():
                if process.is_running():
                    process.kill()
            self.process.wait(10)
        self._stderr.close()
        self._stdout.close()


class Launcher:
    """Starts peers that all end with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.peers: list[PeerProcess] = []

    def start(
        self, name: str, *arguments: str, joins: PeerProcess | None = None, **env: str
    ) -> PeerProcess:
        """Start a small peer; without ``joins`` the arguments say how it finds a swarm."""
        way_in = [f"--initial-peers={joins.address()}"] if joins else []
        peer = PeerProcess(
            self._folder / name, [*SMALL, f"--name={name}", *way_in, *arguments], env
        )
        self.peers.append(peer)
        return peer


@contextmanager
def launcher(folder: Path) -> Iterator[Launcher]:
    """Yield a launcher; its peers are killed in the end if they still run."""
    made = Launcher(folder)
    try:
        yield made
    finally:
        for peer in made.peers:
            peer.end()


def gone(processes: Sequence[psutil.Process]) -> bool:
    """Return whether none of the processes runs any more."""
    return not any(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        for process in processes
        if psutil.pid_exists(process.pid)
    )


def seconds_until_gone(processes: Sequence[psutil.Process], within: float) -> float:
    """Wait until all the processes have ended; returns how long that took."""
    began_at = time.monotonic()
    wait_until(lambda: gone(processes), f"{len(processes)} processes end", within=within)
    return time.monotonic() - began_at
