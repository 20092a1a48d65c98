"""Leaving on request: what signals mean in each phase of a peer's life."""

import os
import signal
import sys
import threading
from types import FrameType

_INTERRUPTED = 130


class LeaveRequestedError(BaseException):
    """Somebody asked this process to stop while it was starting."""


class Leaving:
    """Turns SIGINT and SIGTERM into leaving in good order.

    While the peer starts, the first signal raises :class:`LeaveRequestedError` wherever the
    main thread is. Once :meth:`settle` was called it only sets :attr:`event`. A second
    Ctrl-C ends the process at once; its children die with it.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reason = "done"
        self._pid = os.getpid()
        self._settled = False

    def install(self) -> None:
        """Install the handlers; again after hivemind has overwritten one of them."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def settle(self) -> None:
        """Say that the main thread looks at the event from now on."""
        self._settled = True
        self.install()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child that inherited this handler
            os._exit(_INTERRUPTED)
        if self.event.is_set() and number == signal.SIGINT:
            os._exit(_INTERRUPTED)
        first = not self.event.is_set()
        self.reason = signal.Signals(number).name
        self.event.set()
        if first:
            sys.stderr.write("leaving; press Ctrl-C again to quit at once\n")
        if not self._settled and first:
            raise LeaveRequestedError(self.reason)
