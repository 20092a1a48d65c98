"""How much may be under way to one peer: enough to fill the line, too little to flood it.

TCP finds the rate of a line by itself, but the system's buffers take megabytes at once. What
lies in them cannot be overtaken by what is urgent, and connections that empty theirs at the
same moment overflow the line that they share.
"""

import math
from collections import deque

from opendiloco.units import Seconds

LEAST_BYTES = 3 << 19
"""Six parts. Measured at 200 Mbit/s and 100 ms with four peers: less leaves the lines idle, more
makes rounds no faster until it makes them overflow. Windows that shrink further drift apart,
and everybody waits for the smallest."""

MOST_BYTES = 1 << 26

_ROUND_TRIPS = 1.5  # of an idle line, that an acknowledgement may take on a full one
_SLACK = Seconds(0.05)  # beyond them; on short lines the processes at the ends take longer
_GROWTH = 0.5  # of what was acknowledged in time
_DECAY = 0.5  # of what was acknowledged late
_MEMORY = Seconds(60.0)  # for the shortest round trip, once or twice


class SendWindow:
    """Bytes that were sent and not acknowledged, and how many there may be.

    Grows while acknowledgements come soon after a line's shortest round trip, and shrinks
    when they come late, as delay-based congestion control does (Vegas; LEDBAT, RFC 6817).
    It outlives the rounds, so that the next one begins with what the last one found out.

    Attributes:
        num_bytes: How many there may be.
        num_outstanding: How many there are.
    """

    def __init__(self) -> None:
        self.num_bytes = LEAST_BYTES
        self.num_outstanding = 0
        self._num_sent = 0
        self._num_acknowledged = 0
        self._sent: deque[tuple[int, int, float]] = deque()  # end and size of a frame, and when
        self._shortest = (math.inf, math.inf)  # in the time before, and now
        self._shortest_since = -math.inf

    @property
    def has_room(self) -> bool:
        """Whether one more frame may be sent."""
        return self.num_outstanding < self.num_bytes

    def send(self, num_bytes: int, moment: float) -> None:
        """Take note that a frame is sent at a moment, on the monotonic clock."""
        self.num_outstanding += num_bytes
        self._num_sent += num_bytes
        self._sent.append((self._num_sent, num_bytes, moment))

    def acknowledge(self, num_bytes: int, moment: float) -> None:
        """Take note that the peer has received so many bytes more.

        Raises:
            ValueError: If they were never sent.
        """
        if num_bytes > self.num_outstanding:
            raise ValueError("acknowledged what was never sent")
        is_full = 2 * self.num_outstanding > self.num_bytes
        self.num_outstanding -= num_bytes
        self._num_acknowledged += num_bytes
        while self._sent and self._sent[0][0] <= self._num_acknowledged:
            _, size, sent_at = self._sent.popleft()
            round_trip = moment - sent_at
            self._learn(round_trip, moment)
            if round_trip > _ROUND_TRIPS * min(self._shortest) + _SLACK:
                self._resize(-_DECAY * size)
            elif is_full:  # otherwise it is not the window that limits
                self._resize(_GROWTH * size)

    def _resize(self, num_bytes: float) -> None:
        self.num_bytes = max(LEAST_BYTES, min(MOST_BYTES, self.num_bytes + round(num_bytes)))

    def _learn(self, round_trip: float, moment: float) -> None:
        before, now = self._shortest
        if moment - self._shortest_since > _MEMORY:
            before, now = now, math.inf
            self._shortest_since = moment
        self._shortest = (before, min(now, round_trip))
