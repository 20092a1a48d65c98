"""Processes that take orders: one JSON object a line, and one answer to each.

Both ends are here: :class:`OrderedProcess` starts and commands one, :func:`obey` is the loop
inside it.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil

Answer = dict[str, Any]

_ROOT = Path(__file__).parents[2]
_START = 120.0  # seconds to import torch, several processes at once
_GOODBYE = 20.0


class OrderedProcess:
    """A Python module in a process of its own that does as it is told."""

    def __init__(self, module: str, settings: Any, *, launcher: Sequence[str] = ()) -> None:  # noqa: ANN401 - any dataclass
        """Start it.

        Args:
            module: Its main module.
            settings: A dataclass of JSON values; it gets them on its command line.
            launcher: A command that runs the command after it, for example on another host.
        """
        # Not a context manager: the process writes to it as long as it lives.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._name = f"{module.rpartition('.')[2]} {asdict(settings)}"
        self.process = subprocess.Popen(
            [*launcher, sys.executable, "-m", module, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=_ROOT,
            # With a pool of threads each, many processes on few cores hold each other up.
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            process_group=0,  # Ctrl-C is for the benchmark, which then ends this
        )
        assert self.process.stdout is not None
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout,), name="answers", daemon=True
        )
        self._reader.start()

    def wait_until_up(self) -> None:
        """Return when it can take orders."""
        self.answer(within=_START)

    def order(self, do: str, **arguments: object) -> None:
        """Tell it what to do; every order has an answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, *, within: float) -> Answer:
        """Return its next answer.

        Raises:
            RuntimeError: If there is none in so many seconds, with its last words.
        """
        try:
            answer = self._answers.get(timeout=within)
        except queue.Empty:
            raise RuntimeError(f"no answer in {within:g} s: {self._last_words()}") from None
        if answer is None:
            raise RuntimeError(f"it has ended: {self._last_words()}")
        return answer

    def end(self) -> None:
        """Give it no more orders and wait for its end; after a while it is killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            root = psutil.Process(self.process.pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
        self._reader.join(_GOODBYE)
        self.process.stdout.close()
        self._log.close()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def _last_words(self) -> str:
        self._log.seek(0)
        return f"{self._name}: {self._log.read()[-2000:]}"


def ask_all(
    processes: Sequence[OrderedProcess], do: str, *, within: float, **arguments: object
) -> list[Answer]:
    """Give all processes the same order at once, and return their answers."""
    for process in processes:
        process.order(do, **arguments)
    return [process.answer(within=within) for process in processes]


def end_all(processes: Sequence[OrderedProcess]) -> None:
    """End all processes, at the same time."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.end)
        for process in processes:
            assert process.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.process.stdin.close()


def obey(handlers: Mapping[str, Callable[..., Answer]]) -> None:
    """Carry out orders from standard input until there are no more.

    Args:
        handlers: What to do for each order; takes its arguments and returns the answer.
    """
    _say({})
    for line in sys.stdin:
        order = json.loads(line)
        _say(handlers[order.pop("do")](**order))


def _say(answer: Answer) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
