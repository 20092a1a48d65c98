"""Leaving on request: what signals mean in each phase of a process's life."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from opendiloco.units import Seconds

_INTERRUPTED = 130


class LeaveRequestedError(BaseException):
    """Somebody asked this process to stop while it was starting."""


class Leaving:
    """Turns SIGINT and SIGTERM into leaving in good order.

    While the process starts, the first signal raises :class:`LeaveRequestedError` wherever
    the main thread is. After :meth:`settle` it only sets :attr:`event`, but for
    :meth:`interrupting`. A second Ctrl-C
    ends the process at once; its children die with it.

    Attributes:
        event: Set once somebody asked; other threads may wait for it, the main thread must
            not: the handler that sets it runs there.
        reason: Which signal came; ``done`` when none did.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reason = "done"
        self._pid = os.getpid()
        self._settled = False
        # Unlike the event, a pipe can be waited for and written to by the same thread.
        self._read_end, self._write_end = os.pipe()

    def install(self) -> None:
        """Install the handlers."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def settle(self) -> None:
        """Say that the main thread looks whether it should leave from now on."""
        self._settled = True
        self.install()

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Have signals interrupt the main thread meanwhile, as while the process starts.

        Raises:
            LeaveRequestedError: If somebody asks or has asked to leave.
        """
        self._settled = False
        try:
            if self.event.is_set():
                raise LeaveRequestedError(self.reason)
            yield
        finally:
            self._settled = True

    def wait(self, timeout: Seconds) -> bool:
        """Return whether somebody asked, or asks within the timeout; for the main thread."""
        readable, _, _ = select.select([self._read_end], [], [], timeout)
        return bool(readable)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child that inherited this handler
            os._exit(_INTERRUPTED)
        if self.event.is_set():
            if number == signal.SIGINT:
                os._exit(_INTERRUPTED)
            return
        self.reason = signal.Signals(number).name
        self.event.set()
        os.write(self._write_end, b"!")
        with contextlib.suppress(OSError, RuntimeError):  # a closed pipe; a write under way
            sys.stderr.write("leaving; press Ctrl-C again to quit at once\n")
        if not self._settled:
            raise LeaveRequestedError(self.reason)
