"""The demo's processes: started with their output in a file, never left behind."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from opendiloco.errors import OpenDiLoCoError
from opendiloco.processes import die_with_parent
from opendiloco.sources import ENV_PREFIX
from opendiloco.units import Seconds

_LAST_LINES = 15


class ChildEndedError(OpenDiLoCoError):
    """A process ended that should not have.

    Attributes:
        log_tail: The last lines of its log.
    """

    def __init__(self, message: str, *, log_tail: str) -> None:
        super().__init__(message)
        self.log_tail = log_tail


class Child:
    """A bootstrap or a peer as a process of this machine.

    Attributes:
        name: What people call it.
        folder: Where its files are.
    """

    def __init__(self, name: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.folder = folder
        self.process = process

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self.process.poll() is None

    @property
    def log(self) -> str:
        """What it has written so far, stdout and stderr."""
        return (self.folder / "log.txt").read_text("utf-8", errors="replace")

    def refuse_end(self, *, codes: Sequence[int]) -> None:
        """Raise if the process has ended.

        Args:
            codes: Exit codes that are all right.

        Raises:
            ChildEndedError: With its last lines, if it ended with another code.
        """
        code = self.process.poll()
        if code is None or code in codes:
            return
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise ChildEndedError(
            f"{self.name} ended with {how}; its log is {self.folder / 'log.txt'}",
            log_tail="\n".join(self.log.splitlines()[-_LAST_LINES:]),
        )


class Children:
    """All processes of the demo; as a context manager it ends them on the way out."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def start(
        self, name: str, folder: Path, arguments: Sequence[str], *, num_threads: int
    ) -> Child:
        """Start a Python module as a process. Call it from the main thread only.

        It dies with this process, and gets no signals from the terminal and no settings from
        the environment.

        Args:
            name: What to call it.
            folder: Made; receives its output in `log.txt`.
            arguments: Module name and its arguments.
            num_threads: Threads that it may compute with.
        """
        folder.mkdir(parents=True, exist_ok=True)
        environ = {key: text for key, text in os.environ.items() if not key.startswith(ENV_PREFIX)}
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ | {"OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"},
                process_group=0,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509
            )
        child = Child(name, folder, process)
        self._children.append(child)
        return child

    def stop(self, grace: Seconds) -> None:
        """End all that still run and wait for them: SIGTERM, and SIGKILL after `grace`."""
        running = [child.process for child in self._children if child.is_running]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + grace
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def children(grace: Seconds) -> Iterator[Children]:
    """Give a place for processes, all of which are ended on the way out.

    Ctrl-C and SIGTERM raise KeyboardInterrupt in the body, and are ignored while the
    processes are being ended, which takes `grace` seconds at most.
    """
    started = Children()
    with _handler(_interrupt):
        try:
            yield started
        finally:
            with _handler(signal.SIG_IGN):
                started.stop(grace)


@contextlib.contextmanager
def _handler(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
