"""Peers whose states differ find out by their records, and end with one, over real p2pd."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from opendiloco.events import Event, EventLog
from opendiloco.state import SLICE_ELEMENTS, FragmentState, OuterState
from opendiloco.tensors import Layout
from opendiloco.transfer import StateExchange
from opendiloco.units import OuterStep, Seconds
from peers.healing import Healer
from tests.support.swarm import Node, nodes, wait_until

pytestmark = pytest.mark.swarm

LAYOUT = Layout.of({"a": (SLICE_ELEMENTS,), "b": (1000, 3)})
SLICE_BYTES = 4 * SLICE_ELEMENTS


def state_of(seed: int, outer_step: int = 5) -> OuterState:
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(LAYOUT.num_params, generator=generator) for _ in range(2)]
    return OuterState(OuterStep(outer_step), 1000, (FragmentState(*vectors),))


class Member:
    """A peer that holds a state, serves it, and looks whether it is the right one."""

    def __init__(self, node: Node, exchange: StateExchange, state: OuterState) -> None:
        self.node = node
        self.exchange = exchange
        self.events: list[Event] = []
        connection = SimpleNamespace(tracker=node.tracker, exchange=exchange, is_leaving=False)
        self.healer = Healer(
            connection,  # type: ignore[arg-type]
            log=EventLog(None, listener=self.events.append),
            heartbeat=Seconds(1.0),
            timeout=Seconds(30.0),
        )
        self.hold(state)

    def hold(self, state: OuterState) -> None:
        self.state = state
        self.exchange.publish(state)
        self.node.tracker.update(outer_step=state.outer_step, digest=state.lineage)

    def look(self) -> None:
        download = self.healer.fetch_better(self.state)
        if download is not None:
            self.hold(download.state)

    def healed(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "healed"]


@contextmanager
def members(folder: Path, *states: OuterState) -> Iterator[list[Member]]:
    """Peers with these states, all of which have seen each other's records."""
    with ExitStack() as stack:
        made = []
        for node, state in zip(
            stack.enter_context(nodes(len(states), folder)), states, strict=True
        ):
            exchange = StateExchange(
                node.dht.dht, LAYOUT, run_key="test-f", leaving=threading.Event()
            )
            stack.callback(exchange.close)
            exchange.start()
            made.append(Member(node, exchange, state))
        wait_until(lambda: all(sees_all(member, made) for member in made), "all records arrive")
        yield made


def sees_all(member: Member, everybody: list[Member]) -> bool:
    member.node.tracker.refresh(Seconds(1.0))
    seen = {peer.peer_id: peer.digest for peer in member.node.tracker.view().peers}
    return seen == {
        other.node.peer_id: other.state.lineage for other in everybody if other is not member
    }


def test_a_peer_with_one_flipped_bit_gets_exactly_the_slice_in_which_it_is(tmp_path: Path) -> None:
    flipped = state_of(1)
    flipped.fragments[0].anchor.view(torch.int32)[77] ^= 1 << 20
    before = flipped.digest

    with members(tmp_path, state_of(1), flipped, state_of(1)) as (first, damaged, third):
        for member in (first, damaged, third):
            member.look()

    assert [len(member.healed()) for member in (first, damaged, third)] == [0, 1, 0]
    event = damaged.healed()[0]
    assert (event["outer_step"], event["slices"], event["bytes"]) == (5, 1, SLICE_BYTES)
    assert (event["digest_before"], event["digest"]) == (before, state_of(1).digest)
    assert before != state_of(1).digest
    assert damaged.state.digest == state_of(1).digest
    assert torch.equal(damaged.state.fragments[0].anchor, state_of(1).fragments[0].anchor)


def test_two_halves_that_trained_apart_end_with_one_state_and_the_losers_say_so(
    tmp_path: Path,
) -> None:
    ours, theirs = state_of(1), state_of(2)

    with members(tmp_path, ours, ours, theirs, theirs) as everybody:
        for member in everybody:
            member.look()

    winner = min(ours.digest, theirs.digest)
    assert {member.state.digest for member in everybody} == {winner}
    assert [len(member.healed()) for member in everybody] == (
        [0, 0, 1, 1] if winner == ours.digest else [1, 1, 0, 0]
    )


def test_a_half_that_is_an_outer_step_further_takes_the_others_along(tmp_path: Path) -> None:
    further = state_of(2, outer_step=6)

    with members(tmp_path, state_of(1), state_of(1), further) as everybody:
        for member in everybody:
            member.look()

    assert {member.state.digest for member in everybody} == {further.digest}
    assert [[event["event"] for event in member.events] for member in everybody] == [
        ["behind"],
        ["behind"],
        [],
    ]


def test_winners_that_do_not_give_the_state_that_they_announce_change_nothing(
    tmp_path: Path,
) -> None:
    mine = state_of(1)

    with members(tmp_path, mine, state_of(2), state_of(2)) as (honest, *rogues):
        for rogue in rogues:
            rogue.exchange.publish(state_of(3))
        honest.look()
        honest.look()

    assert honest.state.digest == mine.digest
    told = [event["event"] for event in honest.events]
    assert told == ["waiting", "waiting"]  # what it is about to do, and that it failed; once
    assert "not the one that it announced" in str(honest.events[1]["text"])
