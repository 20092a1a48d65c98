"""Serves the outer state to other peers and downloads it from them, by verified slices."""

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop
from hivemind import DHT
from hivemind.p2p import P2P, PeerID
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from opendiloco.assembly import Assemblies, Assembly, DonorError, Manifest
from opendiloco.errors import StateUnavailableError, SwarmLostError
from opendiloco.progress.records import PeerRecord
from opendiloco.state import OuterState, slice_bytes
from opendiloco.tensors import Layout
from opendiloco.units import OuterStep, Seconds

_LOOK = Seconds(0.2)  # how often a download looks whether this peer leaves
_STALL = Seconds(15.0)  # a peer that moves no slice for longer is given up
_MAX_MESSAGE_BYTES = 16 << 20
_INDEX_BYTES = 12  # at most, of one index and what separates it from the next
_MAX_TRANSFERS = 4  # at once; further joiners are kept waiting, or turn to another donor

T = TypeVar("T")
_Wanted = TypeAdapter(list[NonNegativeInt])
"""The other half of the protocol: the indices of the slices that a peer asks for."""


@dataclass(frozen=True, slots=True)
class Download:
    """A state that was fetched from peers.

    Attributes:
        state: Complete, its digest checked.
        donor: Peer id of the peer that gave the last slice.
        num_bytes: Payload received, what had to be thrown away included.
        num_slices: Slices of the state that were received; the others are the own state's.
        duration: Wall time.
    """

    state: OuterState
    donor: str
    num_bytes: int
    num_slices: int
    duration: Seconds


class StateExchange:
    """Serves the latest state and fetches others', in a thread of its own.

    States are immutable: transfers under way keep the one they began with while training
    goes on. Nothing is served before the first :meth:`publish`.
    """

    def __init__(self, dht: DHT, layout: Layout, *, run_key: str, leaving: threading.Event) -> None:
        self._dht = dht
        self._leaving = leaving
        self._layout = layout
        self._protocol = f"opendiloco/{run_key}/state/1"
        self._state: OuterState | None = None
        self._loop = uvloop.new_event_loop()
        self._turns = asyncio.Semaphore(_MAX_TRANSFERS)
        self._p2p: P2P | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="state", daemon=True)

    def start(self) -> None:
        """Begin to answer other peers."""
        self._thread.start()
        self._call(self._listen(), timeout=Seconds(30.0))

    def publish(self, state: OuterState) -> None:
        """Serve this state from now on."""
        self._state = state

    def fetch(
        self,
        donors: Sequence[PeerRecord],
        *,
        at_least: OuterStep,
        timeout: Seconds,
        base: OuterState | None = None,
    ) -> Download:
        """Download the state of the first donor that gives one that checks out.

        When a donor dies or stalls, the next one that has the same state goes on where it
        stopped.

        Args:
            donors: Best first.
            at_least: Oldest outer step worth having.
            timeout: For all donors together.
            base: The own state: slices of it that are equal are copied, not asked for.

        Raises:
            StateUnavailableError: If no donor gave such a state in time, or this peer leaves.
        """
        if not donors:
            raise StateUnavailableError("no peer offers a state")
        deadline = time.monotonic() + timeout
        work = self._until_leaving(self._fetch(donors, at_least, deadline, base))
        return self._call(work, timeout=Seconds(timeout + 5.0))

    def close(self) -> None:
        """Stop serving and end the thread."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(SwarmLostError):
            self._call(self._hang_up(), timeout=Seconds(3.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=3.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T], *, timeout: Seconds) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        concurrent.futures.wait([future], timeout)
        if not future.done():
            future.cancel()
            raise SwarmLostError("the p2p daemon does not answer; start this peer again")
        return future.result()

    async def _until_leaving(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work; raise StateUnavailableError when this peer is told to leave meanwhile."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait([task], timeout=_LOOK))[0]:
            if self._leaving.is_set():
                task.cancel()
                raise StateUnavailableError("this peer leaves")
        return task.result()

    async def _listen(self) -> None:
        self._p2p = await self._dht.replicate_p2p()
        await self._p2p.add_binary_stream_handler(
            self._protocol,
            lambda *stream: self.serve_stream(*stream),  # noqa: PLW0108 - tests replace it
        )

    async def _hang_up(self) -> None:
        """End the transfers under way and what listens for new ones."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._p2p is not None:
            await self._p2p.shutdown()

    async def serve_stream(
        self, _info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one peer that wants the state."""
        state = self._state
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, ValueError):
            if state is None or not state.hold():
                return
            try:
                await self._serve(state, reader, writer)
            finally:
                state.release()

    async def _serve(
        self, state: OuterState, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # Nothing may be left to send when this ends: the memory is used again.
        writer.transport.set_write_buffer_limits(high=0)
        manifest = Manifest(
            outer_step=state.outer_step,
            num_tokens=state.num_tokens,
            contributors=list(state.contributors),
            slice_digests=[digest.hex() for digest in state.slice_digests],
        )
        await _send(writer, manifest.model_dump_json().encode())
        # Only now a turn: somebody who asks for nothing must not keep others waiting.
        limit = _INDEX_BYTES * (1 + len(state.slices))
        wanted = _Wanted.validate_json(await _receive(reader, limit=limit), strict=True)
        if len(set(wanted)) < len(wanted) or any(i >= len(state.slices) for i in wanted):
            return
        async with self._turns:
            for index in wanted:
                writer.write(slice_bytes(state.slices[index]))
                await asyncio.wait_for(writer.drain(), _STALL)

    async def _fetch(
        self,
        donors: Sequence[PeerRecord],
        at_least: OuterStep,
        deadline: float,
        base: OuterState | None,
    ) -> Download:
        began_at = time.monotonic()
        assemblies = Assemblies(self._layout, base)
        reasons = []
        for donor in donors:
            left = deadline - time.monotonic()
            if left <= 0:
                reasons.append("out of time")
                break
            try:
                async with asyncio.timeout(left):
                    assembly = await self._fetch_from(donor, at_least, assemblies)
            except Exception as error:  # noqa: BLE001 - the daemon's client raises its own kinds
                reasons.append(f"{donor.name or donor.peer_id[-6:]}: {str(error) or 'no answer'}")
                continue
            return Download(
                assembly.state,
                donor.peer_id,
                num_bytes=assemblies.num_bytes,
                num_slices=assembly.num_received,
                duration=Seconds(time.monotonic() - began_at),
            )
        raise StateUnavailableError(f"no donor gave a usable state ({'; '.join(reasons)})")

    async def _fetch_from(
        self, donor: PeerRecord, at_least: OuterStep, assemblies: Assemblies
    ) -> Assembly:
        if self._p2p is None:
            raise DonorError("not connected")
        _, reader, writer = await asyncio.wait_for(
            self._p2p.call_binary_stream_handler(PeerID.from_base58(donor.peer_id), self._protocol),
            _STALL,
        )
        with contextlib.closing(writer):
            try:
                manifest = Manifest.model_validate_json(await _receive(reader))
            except ValidationError:
                raise DonorError("its answer makes no sense") from None
            if manifest.outer_step < at_least:
                raise DonorError(f"it is only at outer step {manifest.outer_step}")
            digest = manifest.digest
            if manifest.outer_step == donor.outer_step and not digest.startswith(donor.digest):
                raise DonorError("its state is not the one that it announced")
            assembly = await assemblies.get(manifest)
            await _send(writer, json.dumps(assembly.missing()).encode())
            await assembly.receive(reader, stall=_STALL)
        assembly.check()
        return assembly


async def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(4, "big") + message)
    await asyncio.wait_for(writer.drain(), _STALL)


async def _receive(reader: asyncio.StreamReader, *, limit: int = _MAX_MESSAGE_BYTES) -> bytes:
    """Read one message; raises ValueError if it claims to be longer than the limit."""
    size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), _STALL), "big")
    if size > limit:
        raise ValueError(f"a message of {size} bytes was announced")
    return await asyncio.wait_for(reader.readexactly(size), _STALL)
