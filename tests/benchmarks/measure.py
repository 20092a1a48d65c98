"""What a process and its children cost, as the kernel counts it, and on which machine."""

import contextlib
import os
import platform
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class ProcessTree:
    """A process and all its descendants."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def pids(self) -> list[int]:
        """Return the processes that there are now."""
        return [self._root.pid, *(child.pid for child in self._root.children(recursive=True))]

    def cpu_seconds(self) -> float:
        """Return the time that the processors spent on it, user and system together."""
        return sum(map(_cpu_seconds, self.pids()))

    def memory_bytes(self) -> int:
        """Return the memory that it has; what processes share, shared memory too, in parts.

        Pages of files do not count: other programs map the same libraries, and what falls to
        this one would change with their coming and going.
        """
        return sum(map(_memory_bytes, self.pids()))


class PeakMeter:
    """The most memory that a tree had while a thread looked at it."""

    def __init__(self, tree: ProcessTree, *, interval: float) -> None:
        self._pids = tree.pids()
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self.peak_bytes = 0

    def start(self) -> None:
        """Begin to look, every `interval` seconds."""
        self._thread.start()

    def stop(self) -> None:
        """Look for the last time."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, sum(map(_memory_bytes, self._pids)))
            if self._done.wait(self._interval):
                return


@contextmanager
def peak_memory(tree: ProcessTree, *, interval: float) -> Iterator[PeakMeter]:
    """Look at the memory of a tree every `interval` seconds until the block is left."""
    meter = PeakMeter(tree, interval=interval)
    meter.start()
    try:
        yield meter
    finally:
        meter.stop()


def busy_seconds() -> float:
    """Return the time that all processors of this machine together have been busy."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def provenance() -> dict[str, object]:
    """Return the commit and the machine, for a line of results."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7"],  # noqa: S607 - whichever git there is
        capture_output=True,
        text=True,
        check=False,
    )
    cpus = [
        line.split(":", 1)[1].strip()
        for line in (_PROC / "cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "commit": described.stdout.strip(),
        "cores": os.cpu_count(),
        "cpu": cpus[0] if cpus else platform.machine(),
    }


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # The second field, in parentheses, is the process's name and may hold spaces.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return 0.0


def _memory_bytes(pid: int) -> int:
    num_kib = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                num_kib += int(line.split()[1])
    return 1024 * num_kib
