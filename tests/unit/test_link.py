"""One link, over real sockets: what goes first, how much at once, and when a peer is given up."""

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from opendiloco.averaging.frames import HEADER_BYTES, Frame, FrameKind, read_header
from opendiloco.averaging.link import Link, Stream
from opendiloco.averaging.window import LEAST_BYTES
from opendiloco.units import Seconds

TAG = b"8 bytes!"
PART = bytes(1 << 18)
STALL = Seconds(0.5)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that waits for something."""

    @functools.wraps(test)
    def run(*arguments: object, **named: object) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@dataclass
class End:
    """A link, and what it has heard."""

    link: Link
    received: list[Frame] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def run(self) -> None:
        async def receive(_peer_id: str, frame: Frame) -> None:
            self.received.append(frame)

        def lose(_peer_id: str, reason: str, *, may_return: bool) -> None:
            self.lost.append(f"{reason}; may return: {may_return}")

        self.link.run(receive, lose)


def make_end(streams: list[Stream]) -> End:
    return End(Link("other", 1, streams, max_payload_bytes=1 << 20, stall=STALL))


@asynccontextmanager
async def streams(count: int = 1) -> AsyncIterator[tuple[list[Stream], list[Stream]]]:
    """Both ends of so many connections."""
    here: list[Stream] = []
    there: list[Stream] = []
    for _ in range(count):
        one, other = socket.socketpair()
        here.append(await asyncio.open_connection(sock=one))
        there.append(await asyncio.open_connection(sock=other))
    try:
        yield here, there
    finally:
        for _, writer in [*here, *there]:
            writer.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Return when something is so, soon."""
    async with asyncio.timeout(10.0):
        while not is_so():  # noqa: ASYNC110 - a list tells nobody
            await asyncio.sleep(0.01)


def contribution(part: int) -> Frame:
    return Frame(FrameKind.CONTRIBUTION, TAG, part, payload=PART)


@pytest.mark.parametrize("count", [1, 2])
@in_a_loop
async def test_many_times_the_window_arrives_whole_in_both_directions(count: int) -> None:
    num_frames = 8 * LEAST_BYTES // len(PART)
    async with streams(count) as (here, there):
        ends = [make_end(here), make_end(there)]
        for end in ends:
            end.run()

        for part in range(num_frames):
            for end in ends:
                await end.link.send(contribution(part))
        await until(lambda: all(len(end.received) == num_frames for end in ends))

        for end in ends:
            assert {frame.part for frame in end.received} == set(range(num_frames))
            assert {frame.payload for frame in map(_as_bytes, end.received)} == {PART}
            assert end.lost == []
            end.link.close()


@in_a_loop
async def test_messages_overtake_averages_and_averages_overtake_contributions() -> None:
    async with streams() as (here, there):
        sender, receiver = make_end(here), make_end(there)
        sender.run()
        for part in range(20):  # more than the window and the buffers take
            sender.link.post(contribution(part))
        sender.link.post(Frame(FrameKind.AVERAGE, TAG, part=77, payload=PART))
        sender.link.post(Frame(FrameKind.STATUS, TAG, payload=b"{}"))

        receiver.run()
        await until(lambda: len(receiver.received) == 22)

        assert [frame.kind for frame in receiver.received[:2]] == [
            FrameKind.STATUS,
            FrameKind.AVERAGE,
        ]
        sender.link.close()
        receiver.link.close()


@in_a_loop
async def test_no_more_than_the_window_is_sent_to_who_acknowledges_nothing() -> None:
    async with streams() as (here, there):
        sender = make_end(here)
        sender.run()
        num_read = 0

        async def read() -> None:
            nonlocal num_read
            while chunk := await there[0][0].read(1 << 20):
                num_read += len(chunk)

        reading = asyncio.create_task(read())
        for part in range(100):
            sender.link.post(contribution(part))
        await until(lambda: bool(sender.lost))
        await reading

        assert sender.lost == ["took nothing for 0.5 s; may return: False"]
        num_frames = LEAST_BYTES // len(PART)
        assert num_read == num_frames * (HEADER_BYTES + len(PART))


@in_a_loop
async def test_messages_reach_who_acknowledges_nothing() -> None:
    async with streams() as (here, there):
        sender = make_end(here)
        sender.run()
        reader, _ = there[0]
        for part in range(10):
            sender.link.post(contribution(part))
        for _ in range(LEAST_BYTES // len(PART)):
            await reader.readexactly(HEADER_BYTES + len(PART))

        sender.link.post(Frame(FrameKind.PING, TAG))
        frame, _ = read_header(await reader.readexactly(HEADER_BYTES), max_payload_bytes=0)

        assert frame.kind is FrameKind.PING
        sender.link.close()


@in_a_loop
async def test_who_acknowledges_what_was_never_sent_breaks_the_protocol() -> None:
    async with streams() as (here, there):
        end = make_end(here)
        end.run()

        there[0][1].write(Frame(FrameKind.ACK, TAG, part=1).header())
        await until(lambda: bool(end.lost))

        assert "acknowledged what was never sent" in end.lost[0]
        assert "may return: False" in end.lost[0]


@in_a_loop
async def test_what_is_left_of_a_round_that_is_over_is_not_sent() -> None:
    async with streams() as (here, there):
        sender, receiver = make_end(here), make_end(there)
        for end in (sender, receiver):
            end.run()
        for part in range(40):
            sender.link.post(contribution(part))
        sender.link.forget(TAG)
        sender.link.post(Frame(FrameKind.LEAVE, TAG, payload=b"{}"))

        async with asyncio.timeout(5.0):
            await sender.link.flush()
        await until(lambda: any(f.kind is FrameKind.LEAVE for f in receiver.received))

        assert sum(frame.is_bulk for frame in receiver.received) <= LEAST_BYTES // len(PART)
        sender.link.close()
        receiver.link.close()


def _as_bytes(frame: Frame) -> Frame:
    return frame.carrying(bytes(frame.payload))
