"""One link to another peer: frames out by urgency and within a window, frames in."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from opendiloco.averaging.frames import HEADER_BYTES, Frame, FrameKind, read_header
from opendiloco.averaging.window import SendWindow
from opendiloco.units import Seconds

_BULK_AHEAD = 4  # contributions that may wait in front of a busy line, so that it is never idle
_BUFFER_BYTES = 1 << 18  # more would make messages wait behind it on slow lines
_ACK_BYTES = 1 << 16  # of bulk, after which the sender hears of it

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Receive = Callable[[str, Frame], Awaitable[None]]
"""Takes a frame from a peer; while it does not return, that stream is not read on."""


class Lost(Protocol):
    """Hears that the link to a peer is lost."""

    def __call__(self, peer_id: str, reason: str, *, may_return: bool) -> None:
        """Take note of why, and of whether the peer may well come back."""
        ...


@dataclass(order=True, slots=True)
class _Waiting:
    """A frame that is to be sent; what comes first in the order is sent first."""

    rank: int
    serial: int
    frame: Frame = field(compare=False)
    holds_room: bool = field(compare=False)


class Link:
    """All streams to one peer. Frames may overtake each other.

    Attributes:
        peer_id: Whom it leads to.
        number: Later links of the same peer have higher ones.
        was_heard: Whether anything has come in since this was last set to False.
    """

    def __init__(
        self,
        peer_id: str,
        number: int,
        streams: list[Stream],
        *,
        max_payload_bytes: int,
        stall: Seconds,
    ) -> None:
        self.peer_id = peer_id
        self.number = number
        self.was_heard = True
        for _, writer in streams:
            writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        self._streams = streams
        self._max_payload_bytes = max_payload_bytes
        self._stall = stall
        self._waiting: list[_Waiting] = []  # a heap
        self._serial = itertools.count()
        self._may_send = asyncio.Event()
        self._window = SendWindow()
        self._num_unacknowledged = 0
        self._room = asyncio.Semaphore(_BULK_AHEAD)
        self._stale_tag = b""
        self._unsent = 0
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._task: asyncio.Task[None] | None = None

    def run(self, receive: Receive, lost: Lost) -> None:
        """Begin to send and receive, until a stream fails or :meth:`close` is called."""
        self._task = asyncio.create_task(self._run(receive, lost))

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._task is not None and not self._task.done()

    def post(self, frame: Frame) -> None:
        """Have a frame sent as soon as possible."""
        self._put(frame, holds_room=False)

    async def send(self, frame: Frame) -> None:
        """Have a bulk frame sent; returns when few enough others are waiting."""
        await self._room.acquire()
        self._put(frame, holds_room=True)

    def forget(self, tag: bytes) -> None:
        """Do not send what is left of a round that is over, apart from messages."""
        self._stale_tag = tag

    async def flush(self) -> None:
        """Return when everything that was posted has been written."""
        await self._all_sent.wait()

    def close(self) -> None:
        """End the link; nobody is told that it is lost."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, receive: Receive, lost: Lost) -> None:
        reason, may_return = "the connection is lost", True
        try:
            async with asyncio.TaskGroup() as tasks:
                for reader, writer in self._streams:
                    tasks.create_task(self._receive_from(reader, receive))
                    tasks.create_task(self._send_to(writer))
        except* TimeoutError:
            reason, may_return = f"took nothing for {self._stall:g} s", False
        except* (OSError, EOFError):
            pass
        except* ValueError as errors:
            reason, may_return = f"broke the protocol: {errors.exceptions[0]}", False
        finally:
            self._all_sent.set()
            for _, writer in self._streams:
                writer.close()
        lost(self.peer_id, reason, may_return=may_return)

    def _put(self, frame: Frame, *, holds_room: bool) -> None:
        if not self.is_open:
            return
        self._unsent += 1
        self._all_sent.clear()
        heapq.heappush(self._waiting, _Waiting(frame.rank, next(self._serial), frame, holds_room))
        self._may_send.set()

    async def _send_to(self, writer: asyncio.StreamWriter) -> None:
        while True:
            frame = await self._next()
            if frame.tag != self._stale_tag or frame.kind >= FrameKind.WANT:
                if frame.is_bulk:
                    self._window.send(len(frame.payload), time.monotonic())
                writer.writelines((frame.header(), frame.payload))
                await self._drain(writer)
            self._unsent -= 1
            if not self._unsent:
                self._all_sent.set()

    async def _next(self) -> Frame:
        """Return the most urgent frame once it may be sent.

        Raises:
            TimeoutError: If the peer acknowledges nothing of what it was sent.
        """
        while True:
            if self._waiting and (self._window.has_room or not self._waiting[0].frame.is_bulk):
                next_one = heapq.heappop(self._waiting)
                if next_one.holds_room:
                    self._room.release()
                if self._waiting:
                    self._may_send.set()  # for the other streams
                return next_one.frame
            self._may_send.clear()
            outstanding = self._window.num_outstanding
            try:
                async with asyncio.timeout(self._stall if self._waiting else None):
                    await self._may_send.wait()
            except TimeoutError:
                if self._waiting and self._window.num_outstanding == outstanding:
                    raise

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        """Wait until the stream can take more; raises TimeoutError if it takes nothing at all."""
        while True:
            left = writer.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(self._stall):
                    await writer.drain()
            except TimeoutError:
                if writer.transport.get_write_buffer_size() >= left:
                    raise
            else:
                return

    async def _receive_from(self, reader: asyncio.StreamReader, receive: Receive) -> None:
        while True:
            header = await reader.readexactly(HEADER_BYTES)
            self.was_heard = True
            frame, length = read_header(header, max_payload_bytes=self._max_payload_bytes)
            payload = bytearray(length)
            with memoryview(payload) as view:
                filled = 0
                while filled < length:
                    chunk = await reader.read(length - filled)
                    if not chunk:
                        raise EOFError
                    view[filled : filled + len(chunk)] = chunk
                    filled += len(chunk)
                    self.was_heard = True
                    if frame.is_bulk:
                        self._acknowledge(len(chunk), frame.tag, is_last=filled == length)
            if frame.kind is FrameKind.ACK:
                self._window.acknowledge(frame.part, time.monotonic())
                self._may_send.set()
            else:
                await receive(self.peer_id, frame.carrying(payload))

    def _acknowledge(self, num_bytes: int, tag: bytes, *, is_last: bool) -> None:
        """Tell the peer that more has come in, though not for every few bytes."""
        self._num_unacknowledged += num_bytes
        if is_last or self._num_unacknowledged >= _ACK_BYTES:
            self.post(Frame(FrameKind.ACK, tag, part=self._num_unacknowledged))
            self._num_unacknowledged = 0
