"""Long-lived streams to other peers, over which the rounds' frames travel."""

import asyncio
import contextlib
import struct
import time
from collections.abc import Coroutine
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from opendiloco.averaging.link import Link, Lost, Receive, Stream
from opendiloco.units import Seconds

MAX_STREAMS = 2
"""Per pair of peers. One stream does not fill a line of long delay alone (its window is the
limit, and grows slowly); with several peers, more streams only get into each other's way."""

_OPEN = Seconds(5.0)  # for one attempt to open a link

_GREETING = struct.Struct(">QBB")  # number of the link; index and number of its streams


class Links:
    """The links of this peer, by peer id. Lives in one event loop.

    Attributes:
        num_streams: Of links that this peer opens from now on.
    """

    def __init__(
        self,
        p2p: P2P,
        protocol: str,
        *,
        receive: Receive,
        lost: Lost,
        max_payload_bytes: int,
        stall: Seconds,
    ) -> None:
        """Prepare.

        Args:
            p2p: Client of this peer's p2p daemon.
            protocol: Name of the streams; peers with another one cannot connect.
            receive: Takes every frame.
            lost: Hears of every link that is lost.
            max_payload_bytes: A peer that announces a longer one is cut off.
            stall: A peer that takes nothing for longer is cut off.
        """
        self.num_streams = MAX_STREAMS
        self._p2p = p2p
        self._protocol = protocol
        self._receive = receive
        self._lost = lost
        self._max_payload_bytes = max_payload_bytes
        self._stall = stall
        self._links: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Task[Link]] = {}
        self._arriving: dict[str, tuple[int, list[Stream]]] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Accept links from others from now on."""
        await self._p2p.add_binary_stream_handler(self._protocol, self._accept)
        await self._p2p.add_binary_stream_handler(f"{self._protocol}/knock", _hang_up)

    async def knock(self, peer_id: str) -> None:
        """Return when a peer that listens is seen to be there.

        Raises:
            OSError, P2PDaemonError: If it is not.
        """
        _, reader, writer = await self._p2p.call_binary_stream_handler(
            PeerID.from_base58(peer_id), f"{self._protocol}/knock"
        )
        try:
            await reader.read()
        finally:
            writer.close()

    def get(self, peer_id: str) -> Link | None:
        """Return the open link to a peer, if there is one."""
        link = self._links.get(peer_id)
        return link if link is not None and link.is_open else None

    async def connect(self, peer_id: str, *, opens: bool) -> Link:
        """Return the link to a peer.

        Args:
            peer_id: The other peer.
            opens: Whether this peer is the one of the two that opens links; otherwise wait
                until the other has done so.
        """
        while (link := self.get(peer_id)) is None:
            if opens:
                # An attempt from before may hang on a peer that was stopped then.
                with contextlib.suppress(TimeoutError):
                    await asyncio.shield(self._opening_of(peer_id))
            else:
                async with self._changed:
                    await self._changed.wait_for(lambda: self.get(peer_id) is not None)
        return link

    def _opening_of(self, peer_id: str) -> asyncio.Task[Link]:
        task = self._opening.get(peer_id)
        if task is None:
            task = self._opening[peer_id] = asyncio.create_task(self._open(peer_id))
            task.add_done_callback(lambda _: self._opening.pop(peer_id, None))
        return task

    def warm(self, peer_id: str) -> None:
        """Open the link to a peer in the background, if it is this one's to open."""
        if self.get(peer_id) is None and peer_id not in self._opening:
            self._start(self._try_open(peer_id))

    def close(self) -> None:
        """End all links."""
        for link in self._links.values():
            link.close()

    async def _try_open(self, peer_id: str) -> None:
        with contextlib.suppress(Exception):  # it is tried again when the link is needed
            await self._opening_of(peer_id)

    async def _open(self, peer_id: str) -> Link:
        number = time.time_ns()
        streams: list[Stream] = []
        try:
            async with asyncio.timeout(min(_OPEN, self._stall / 3)):
                for index in range(self.num_streams):
                    _, reader, writer = await self._p2p.call_binary_stream_handler(
                        PeerID.from_base58(peer_id), self._protocol
                    )
                    streams.append((reader, writer))
                    writer.write(_GREETING.pack(number, index, self.num_streams))
                    await writer.drain()
        except BaseException:
            for _, writer in streams:
                writer.close()
            raise
        return await self._add(peer_id, number, streams)

    async def _accept(
        self,
        info: StreamInfo,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        peer_id = str(info.peer_id)
        try:
            async with asyncio.timeout(self._stall):
                greeting = await reader.readexactly(_GREETING.size)
        except (OSError, EOFError, TimeoutError):
            writer.close()
            return
        number, _, num_streams = _GREETING.unpack(greeting)
        known, streams = self._arriving.get(peer_id, (0, []))
        current = self.get(peer_id)
        if number < known or (current is not None and number < current.number):
            writer.close()  # the rest of an attempt that the other peer has given up
            return
        if number > known:
            for _, stale in streams:
                stale.close()
            streams = []
        streams.append((reader, writer))
        self._arriving[peer_id] = number, streams
        if len(streams) >= min(num_streams, MAX_STREAMS):
            del self._arriving[peer_id]
            await self._add(peer_id, number, streams)

    async def _add(self, peer_id: str, number: int, streams: list[Stream]) -> Link:
        link = Link(
            peer_id,
            number,
            streams,
            max_payload_bytes=self._max_payload_bytes,
            stall=self._stall,
        )
        known = self._links.get(peer_id)
        self._links[peer_id] = link
        if known is not None and known.is_open:
            known.close()
            self._lost(peer_id, "has connected anew", may_return=True)
        link.run(self._receive, self._lost)
        async with self._changed:
            self._changed.notify_all()
        return link

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _hang_up(
    _info: StreamInfo, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.close()
