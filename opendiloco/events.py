"""The event log: one JSON object a line, from which logs, metrics and tests derive."""

import contextlib
import json
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from opendiloco.errors import ConfigError
from opendiloco.units import now

EventField = str | int | float | bool | None
Event = dict[str, EventField]
Listener = Callable[[Event], None]


class EventLog:
    """Appends events to a file and hands them to a listener; safe to use from threads.

    A full disk does not stop training: the first failed write is reported on stderr, and
    the listener still sees every event. Nor does a terminal that is gone: a listener that
    raises OSError is not called again.
    """

    def __init__(self, path: Path | None, *, listener: Listener | None = None) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._warned = False
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", encoding="utf-8", buffering=1)
            except OSError as error:
                raise ConfigError(
                    f"--out-dir: cannot write {path}: {error.strerror}; choose another folder"
                ) from None

    def emit(self, event: str, **fields: EventField) -> None:
        """Write one event with the current time.

        Args:
            event: One of the names in the README's table.
            fields: Its data; durations in seconds, sizes in bytes.
        """
        record: Event = {"t": now(), "event": event}
        record.update({name: _plain(value) for name, value in fields.items()})
        with self._lock:
            self._write(json.dumps(record))
            if self._listener is not None:
                self._tell(self._listener, record)

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
        except OSError as error:
            if not self._warned:
                self._warned = True
                sys.stderr.write(f"events are no longer written: {error.strerror}\n")

    def _tell(self, listener: Listener, record: Event) -> None:
        try:
            listener(record)
        except OSError:  # the terminal is closed, or a file that it was sent to is full
            self._listener = None

    def close(self) -> None:
        """Flush and close the file; later events go to the listener only."""
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
                self._file = None


def _plain(value: EventField) -> EventField:
    """Return the value as JSON knows it: there is no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
