"""States go from peer to peer whole and checked, or not at all."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hivemind.p2p import P2P, PeerID

from opendiloco.errors import StateUnavailableError
from opendiloco.progress.records import PeerRecord
from opendiloco.state import SLICE_ELEMENTS, FragmentState, OuterState
from opendiloco.tensors import Layout
from opendiloco.transfer import StateExchange
from opendiloco.units import OuterStep, Seconds
from tests.support.swarm import Node, nodes

pytestmark = pytest.mark.swarm

LAYOUT = Layout.of({"a": (SLICE_ELEMENTS,), "b": (1000, 3)})


def state_at(outer_step: int) -> OuterState:
    generator = torch.Generator().manual_seed(outer_step)
    size = LAYOUT.num_params
    vectors = [torch.randn(size, generator=generator) for _ in range(2)]
    return OuterState(OuterStep(outer_step), 100 * outer_step, (FragmentState(*vectors),))


class Exchanges:
    """Three nodes that exchange states; the last one only fetches."""

    def __init__(self, made: list[Node], exchanges: list[StateExchange]) -> None:
        self.nodes = made
        self.donors = exchanges[:-1]
        self.joiner = exchanges[-1]

    def record(self, index: int, outer_step: int, digest: str = "") -> PeerRecord:
        return PeerRecord(
            peer_id=self.nodes[index].peer_id,
            name=f"donor-{index}",
            outer_step=outer_step,
            digest=digest,
        )


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exchanges]:
    folder: Path = tmp_path_factory.mktemp("identities")
    with ExitStack() as stack:
        made = stack.enter_context(nodes(3, folder))
        exchanges = [
            StateExchange(node.dht.dht, LAYOUT, run_key="test-f", leaving=threading.Event())
            for node in made
        ]
        for exchange in exchanges:
            stack.callback(exchange.close)
            exchange.start()
        yield Exchanges(made, exchanges)


def test_a_joiner_gets_the_donors_state_to_the_bit(three: Exchanges) -> None:
    state = state_at(7)
    three.donors[0].publish(state)

    download = three.joiner.fetch(
        [three.record(0, 7, state.digest[:16])], at_least=OuterStep(1), timeout=Seconds(20.0)
    )

    assert download.state.outer_step == 7
    assert download.state.num_tokens == 700
    fetched, given = download.state.fragments[0], state.fragments[0]
    assert torch.equal(fetched.anchor, given.anchor)
    assert torch.equal(fetched.momentum, given.momentum)
    assert download.num_bytes == 2 * 4 * LAYOUT.num_params
    assert download.num_slices == 4


def test_a_state_that_is_too_old_is_passed_over(three: Exchanges) -> None:
    three.donors[0].publish(state_at(3))
    three.donors[1].publish(state_at(9))

    download = three.joiner.fetch(
        [three.record(0, 8), three.record(1, 9)], at_least=OuterStep(8), timeout=Seconds(20.0)
    )

    assert download.state.outer_step == 9
    assert download.donor == three.nodes[1].peer_id


def test_a_donor_whose_state_is_not_the_announced_one_is_passed_over(three: Exchanges) -> None:
    three.donors[0].publish(state_at(4))

    with pytest.raises(StateUnavailableError, match="not the one that it announced"):
        three.joiner.fetch(
            [three.record(0, 4, "0123456789abcdef")], at_least=OuterStep(1), timeout=Seconds(20.0)
        )


def test_a_peer_that_is_not_in_step_serves_nothing(three: Exchanges) -> None:
    with pytest.raises(StateUnavailableError, match="donor-2"):
        three.donors[0].fetch([three.record(2, 5)], at_least=OuterStep(1), timeout=Seconds(20.0))


def test_a_donor_that_is_gone_is_an_answer_not_a_hang(three: Exchanges) -> None:
    stranger = PeerRecord(
        peer_id="QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC", name="ghost", outer_step=5
    )

    with pytest.raises(StateUnavailableError, match="ghost"):
        three.joiner.fetch([stranger], at_least=OuterStep(1), timeout=Seconds(20.0))


def test_a_state_of_another_model_is_refused(three: Exchanges) -> None:
    small = torch.zeros(10)
    three.donors[0].publish(OuterState(OuterStep(5), 0, (FragmentState(small, small),)))

    with pytest.raises(StateUnavailableError, match="another model"):
        three.joiner.fetch([three.record(0, 5)], at_least=OuterStep(1), timeout=Seconds(20.0))


def test_a_state_with_infinities_is_refused(three: Exchanges) -> None:
    state = state_at(5)
    state.fragments[0].momentum[17] = float("inf")
    three.donors[0].publish(state)

    with pytest.raises(StateUnavailableError, match="not finite"):
        three.joiner.fetch([three.record(0, 5)], at_least=OuterStep(1), timeout=Seconds(20.0))


def test_only_slices_that_differ_from_the_own_state_are_asked_for(three: Exchanges) -> None:
    state, own = state_at(7), state_at(7)
    own.fragments[0].momentum.view(torch.int32)[SLICE_ELEMENTS] ^= 1  # in its second slice
    three.donors[0].publish(state)

    download = three.joiner.fetch(
        [three.record(0, 7)], at_least=OuterStep(7), timeout=Seconds(20.0), base=own
    )

    assert download.state.digest == state.digest
    assert (download.num_slices, download.num_bytes) == (1, 4 * 3000)


async def ask(p2p: P2P, donor: str, message: bytes) -> bytes:
    """Open the donor's stream, send a message as it is, and return all that comes after."""
    _, reader, writer = await p2p.call_binary_stream_handler(
        PeerID.from_base58(donor), "opendiloco/test-f/state/1"
    )
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        await reader.readexactly(size)  # the manifest
        writer.write(message)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 20.0)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "wanted",
    [
        b"[10000000]",
        b"[-1]",
        b'["0"]',
        b"[0.5]",
        b'{"a": 1}',
        b"7",
        b"[0,0]",
        b"\xff",
        b"[" + b"0," * 10000 + b"0]",
    ],
)
def test_senseless_wishes_are_answered_with_nothing_and_do_no_harm(
    three: Exchanges, wanted: bytes
) -> None:
    state = state_at(6)
    three.donors[0].publish(state)
    donor = three.nodes[0].peer_id

    message = len(wanted).to_bytes(4, "big") + wanted
    asks = three.joiner
    assert asks._p2p is not None
    answer = asks._call(ask(asks._p2p, donor, message), timeout=Seconds(30.0))

    assert answer == b""
    download = three.joiner.fetch(
        [three.record(0, 6)], at_least=OuterStep(1), timeout=Seconds(20.0)
    )
    assert download.state.digest == state.digest


class Rogue:
    """Takes the place of a donor's server and answers what it likes."""

    def __init__(self, exchange: StateExchange, state: OuterState) -> None:
        self.exchange = exchange
        self.state = state
        self.num_asked = 0

    async def serve(
        self, _info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.num_asked += 1
        manifest = {
            "outer_step": self.state.outer_step,
            "num_tokens": self.state.num_tokens,
            "contributors": [],
            "slice_digests": [digest.hex() for digest in self.state.slice_digests],
        }
        message = json.dumps(manifest).encode()
        writer.write(len(message).to_bytes(4, "big") + message)
        await reader.readexactly(4)
        await self.send_slices(writer)
        await writer.drain()
        writer.close()

    async def send_slices(self, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class DamagesTheSecondSlice(Rogue):
    async def send_slices(self, writer: asyncio.StreamWriter) -> None:
        writer.write(self.state.slices[0].numpy().tobytes())
        writer.write(b"x" * self.state.slices[1].numel() * 4)


class HangsUpAfterTheFirstSlice(Rogue):
    async def send_slices(self, writer: asyncio.StreamWriter) -> None:
        writer.write(self.state.slices[0].numpy().tobytes())


@pytest.mark.parametrize("rogue_kind", [DamagesTheSecondSlice, HangsUpAfterTheFirstSlice])
def test_the_next_donor_of_the_same_state_goes_on_where_one_failed(
    three: Exchanges, rogue_kind: type[Rogue], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_at(11)
    rogue = rogue_kind(three.donors[0], state)
    three.donors[1].publish(state)
    monkeypatch.setattr(three.donors[0], "serve_stream", rogue.serve)

    download = three.joiner.fetch(
        [three.record(0, 11), three.record(1, 11)], at_least=OuterStep(1), timeout=Seconds(20.0)
    )

    assert rogue.num_asked == 1
    assert download.state.digest == state.digest
    assert download.donor == three.nodes[1].peer_id
    # The first slice came from the rogue and is not fetched again; a damaged one is.
    damaged = rogue_kind is DamagesTheSecondSlice
    assert download.num_bytes == 2 * 4 * LAYOUT.num_params + (4 * 3000 if damaged else 0)


def test_a_cut_state_is_never_taken_for_a_whole_one(
    three: Exchanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    rogue = HangsUpAfterTheFirstSlice(three.donors[0], state_at(11))
    monkeypatch.setattr(three.donors[0], "serve_stream", rogue.serve)

    with pytest.raises(StateUnavailableError):
        three.joiner.fetch([three.record(0, 11)], at_least=OuterStep(1), timeout=Seconds(20.0))

    assert rogue.num_asked == 1
