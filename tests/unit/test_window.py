"""The window of a link, against lines whose rate and delay are known."""

from collections import deque

import pytest

from opendiloco.averaging.window import LEAST_BYTES, MOST_BYTES, SendWindow

FRAME = 1 << 18


def largest_on(*, rate: float, delay: float, seconds: float = 20.0) -> int:
    """Return the size that a window reaches on a line in so many seconds, always in use.

    Args:
        rate: Bytes per second.
        delay: Seconds for a frame that finds the line idle, there and back.
        seconds: Of use.
    """
    window, moment, idle_from = SendWindow(), 0.0, 0.0
    arrivals: deque[float] = deque()
    largest = 0
    while moment < seconds:
        while window.has_room:
            window.send(FRAME, moment)
            idle_from = max(idle_from, moment) + FRAME / rate
            arrivals.append(idle_from + delay)
        moment = arrivals.popleft()
        window.acknowledge(FRAME, moment)
        largest = max(largest, window.num_bytes)
    return largest


@pytest.mark.parametrize(("mbit", "delay"), [(200, 0.1), (1000, 0.1), (1000, 0.25), (500, 0.03)])
def test_a_line_is_filled_and_not_flooded(mbit: float, delay: float) -> None:
    rate = mbit * 125_000
    needed = rate * delay

    reached = largest_on(rate=rate, delay=delay)

    assert reached >= needed
    # Half a round trip and the slack may wait in front of the line, and twice that for a moment.
    assert reached <= 2 * (1.5 * needed + 0.05 * rate) + LEAST_BYTES


def test_a_slow_line_keeps_the_least_window() -> None:
    assert largest_on(rate=1e6, delay=0.05) <= LEAST_BYTES + FRAME


def test_no_line_makes_it_larger_than_allowed() -> None:
    assert largest_on(rate=1e12, delay=0.1) == MOST_BYTES


def test_it_does_not_grow_while_it_is_not_used() -> None:
    window = SendWindow()

    for step in range(1000):
        window.send(FRAME, moment=step)
        window.acknowledge(FRAME, moment=step + 0.001)

    assert window.num_bytes == LEAST_BYTES


def test_it_shrinks_when_the_line_becomes_slower() -> None:
    window, moment = SendWindow(), 0.0

    def use(num_frames: int, round_trip: float) -> int:
        nonlocal moment
        for _ in range(num_frames):
            while window.has_room:
                window.send(FRAME, moment)
            moment += round_trip
            window.acknowledge(window.num_outstanding, moment)
        return window.num_bytes

    wide = use(10, round_trip=0.1)
    narrow = use(20, round_trip=0.3)

    assert wide > 4 * LEAST_BYTES
    assert narrow == LEAST_BYTES


def test_a_longer_way_is_accepted_after_a_while() -> None:
    window, moment = SendWindow(), 0.0
    sizes = []

    for round_trip in [0.02] * 100 + [0.2] * 1000:
        while window.has_room:
            window.send(FRAME, moment)
        moment += round_trip
        window.acknowledge(window.num_outstanding, moment)
        sizes.append(window.num_bytes)

    assert sizes[200] == LEAST_BYTES
    assert sizes[-1] > LEAST_BYTES


def test_there_is_room_for_as_much_as_the_window_holds() -> None:
    window = SendWindow()

    while window.has_room:
        window.send(FRAME, 0.0)

    assert window.num_outstanding == LEAST_BYTES
    window.acknowledge(1, 0.1)
    assert window.has_room


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    window = SendWindow()
    window.send(100, 0.0)

    with pytest.raises(ValueError, match="never sent"):
        window.acknowledge(101, 0.1)
