"""A stranger who knows the name of the streams cannot disturb the peers' rounds."""

import asyncio
import contextlib
import functools
import os
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import hivemind
import pytest
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID

from opendiloco.averaging.frames import HEADER_BYTES, Frame, FrameKind
from opendiloco.averaging.protocol import RoundOutcome
from tests.contracts.averager_contract import run_round
from tests.contracts.test_hivemind_averager import PublishingAverager
from tests.support.swarm import RUN_ID, Node, nodes

pytestmark = pytest.mark.swarm

PROTOCOL = f"opendiloco/{RUN_ID}-f-none/parts/2"
Attack = Callable[[P2P, PeerID], Awaitable[int]]
"""Returns how many bytes or streams it got rid of."""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Node]]:
    """Two peers with averagers, and a third one who is the stranger."""
    with nodes(3, tmp_path, fragment_sizes=[1000]) as made:
        made[2].tracker.close()
        yield made


def attack(stranger: Node, victim: Node, how: Attack) -> int:
    job = functools.partial(_attack, victim=victim.peer_id, how=how)
    return int(stranger.dht.dht.run_coroutine(job, return_future=True).result(60))


async def _attack(_dht: hivemind.DHT, node: DHTNode, *, victim: str, how: Attack) -> int:
    return await how(node.p2p, PeerID.from_base58(victim))


async def greet(p2p: P2P, victim: PeerID) -> list[asyncio.StreamWriter]:
    """Open a link as a peer would."""
    number, writers = time.time_ns(), []
    for index in range(2):
        _, _, writer = await p2p.call_binary_stream_handler(victim, PROTOCOL)
        writer.write(struct.pack(">QBB", number, index, 2))
        writers.append(writer)
    return writers


async def announce_a_gigabyte(p2p: P2P, victim: PeerID) -> int:
    writers = await greet(p2p, victim)
    header = bytearray(Frame(FrameKind.AVERAGE, b"8 bytes!").header())
    header[12:16] = (2**30).to_bytes(4, "little")
    writers[0].write(bytes(header))
    await writers[0].drain()
    return len(header)


async def send_noise(p2p: P2P, victim: PeerID) -> int:
    writers = await greet(p2p, victim)
    for writer in writers:
        writer.write(os.urandom(1 << 20))
    return sum(map(bool, writers)) << 20


async def send_frames_of_no_round(p2p: P2P, victim: PeerID) -> int:
    writers = await greet(p2p, victim)
    for kind in FrameKind:
        frame = Frame(kind, b"no round", payload=b"{}")
        writers[0].write(frame.header() + b"{}")
    await writers[0].drain()
    return len(FrameKind) * (HEADER_BYTES + 2)


async def open_streams_and_say_nothing(p2p: P2P, victim: PeerID) -> int:
    opened = 0
    for _ in range(50):
        with contextlib.suppress(Exception):
            await p2p.call_binary_stream_handler(victim, PROTOCOL)
            opened += 1
    return opened


@pytest.mark.parametrize(
    "what",
    [announce_a_gigabyte, send_noise, send_frames_of_no_round, open_streams_and_say_nothing],
    ids=lambda what: str(what.__name__),
)
def test_rounds_go_on_under(three: list[Node], what: Attack) -> None:
    first, second, stranger = three
    averagers = [PublishingAverager(first), PublishingAverager(second)]
    before = run_round(averagers, 1000, outer_step=0)

    done = attack(stranger, first, what)
    after = run_round(averagers, 1000, outer_step=1)

    assert done > 0
    for ended in (before, after):
        assert [result.outcome for result in ended] == [RoundOutcome.AVERAGED] * 2
        assert [result.attempts for result in ended] == [1, 1]
