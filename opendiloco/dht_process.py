"""hivemind's DHT process: calls into it that always end, and its own end."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable

import hivemind
from hivemind.utils import MPFuture

from opendiloco.errors import SwarmLostError
from opendiloco.joining import answer
from opendiloco.processes import how_ended
from opendiloco.units import Seconds

_MAX_UNANSWERED = 8
"""So many of the largest requests fit into the pipe to it, which blocks for ever when full."""

_CALL_TIMEOUT = Seconds(10.0)
_QUESTION_TIMEOUT = Seconds(3.0)
_GRACE = Seconds(3.0)
_POLL = Seconds(0.5)


class DHTProcess:
    """The process of a `hivemind.DHT`. The methods may be called from several threads."""

    def __init__(self, dht: hivemind.DHT) -> None:
        self._dht = dht
        self._pipe_lock = threading.Lock()
        self._unanswered: list[MPFuture] = []
        self._closed = False

    def call(
        self,
        send: Callable[[], MPFuture],
        *,
        timeout: Seconds | None = None,
        is_small: bool = False,
    ) -> object:
        """Send it a request; return its answer, None if it fails or is late.

        Args:
            send: Writes the request into the pipe.
            timeout: How long to wait for the answer; by default as long as for any request.
            is_small: Whether the pipe has room for it at any time.
        """
        deadline = time.monotonic() + (_CALL_TIMEOUT if timeout is None else timeout)
        with self._pipe_lock:
            self._unanswered = [future for future in self._unanswered if not future.done()]
            has_room = is_small or len(self._unanswered) < _MAX_UNANSWERED
            if self._is_gone or not has_room:
                return None
            future = send()
            if not is_small:
                self._unanswered.append(future)
        try:
            return self._wait_for(future, deadline)
        except Exception as error:  # noqa: BLE001 - whatever the DHT's process raised comes here
            logging.getLogger(__name__).debug("the DHT did not do it: %r", error)
            return None

    def ask(self, timeout: Seconds = _QUESTION_TIMEOUT) -> None:
        """Raise :class:`SwarmLostError` if it does not answer."""
        send = functools.partial(self._dht.run_coroutine, answer, return_future=True)
        if self.call(send, timeout=timeout, is_small=True) is not True:
            raise SwarmLostError("the DHT's process does not answer; start again")

    def ended(self) -> str:
        """Return how it ended; empty while it runs."""
        return how_ended(self._dht)

    def stop(self) -> None:
        """End it: politely, then with SIGTERM, then with SIGKILL. Harmless when done twice."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._dht.shutdown()
        if self._dht.is_alive():
            self._dht.join(_GRACE)
            self._dht.kill()
        self._dht.join(_GRACE)

    @property
    def _is_gone(self) -> bool:
        return self._closed or not self._dht.is_alive()

    def _wait_for(self, future: MPFuture, deadline: float) -> object:
        """Return the answer; raises TimeoutError if it is late, or nobody is left to give it."""
        while True:
            try:
                return future.result(max(0.0, min(_POLL, deadline - time.monotonic())))
            except TimeoutError:
                if time.monotonic() >= deadline or self._is_gone:
                    raise


def forget_killed_children() -> None:
    """Give hivemind new locks and pipes, since a killed child may have held the old ones.

    A child that dies while it sends a result leaves a lock taken or half a message in a
    pipe, and nothing gets through any more, not even from new children (1.1.12). Only for
    when no child of hivemind's is left.
    """
    MPFuture.reset_backend()
