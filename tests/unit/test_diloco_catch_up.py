"""A peer that takes over the swarm's state: by the exact rule, with or without its own work."""

import numpy as np
import pytest
import torch

from opendiloco.diloco import Verdict
from opendiloco.state import FragmentState, OuterState
from opendiloco.tensors import Layout
from opendiloco.units import OuterStep
from tests.support.outer_loop import Peer, flat, model, trained

PEER_ID = "me"


def newer_state(layout: Layout) -> OuterState:
    state = OuterState.initial(layout, model(seed=50))
    momentum = tuple(FragmentState(f.anchor, f.anchor / 2) for f in state.fragments)
    return OuterState(OuterStep(8), 9000, momentum)


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_a_rebase_puts_local_progress_on_the_new_anchor(num_fragments: int) -> None:
    peer = Peer(num_fragments=num_fragments)
    state = newer_state(peer.layout)
    local = trained(model(), seed=1)
    peer.diloco.count(num_steps=4, num_tokens=60)

    report = peer.diloco.adopt(state, local, keep_local_work=True)

    expected = flat(model(seed=50)) + (flat(local) - flat(model()))
    assert report.parameters is not None
    assert report.verdict is Verdict.REBASED
    np.testing.assert_array_equal(flat(dict(report.parameters)), expected)
    assert (peer.diloco.state, report.outer_step) == (state, 8)
    assert (peer.diloco.num_tokens, peer.diloco.inner_step) == (60, 4)


def test_rebased_work_is_what_the_next_round_sends() -> None:
    peer = Peer()
    peer.diloco.count(num_steps=4, num_tokens=60)
    local = trained(model(), seed=1)
    report = peer.diloco.adopt(newer_state(peer.layout), local, keep_local_work=True)

    assert report.parameters is not None
    peer.begin(dict(report.parameters), num_tokens=0)

    assert peer.averager.requests[0].num_tokens == 60
    progress = flat(model()) - flat(local)
    np.testing.assert_allclose(peer.contribution(), progress, rtol=0, atol=5e-7)


def test_a_rebase_reads_half_precision_parameters_as_float32() -> None:
    peer = Peer()
    local = {name: tensor.bfloat16() for name, tensor in trained(model(), seed=1).items()}

    report = peer.diloco.adopt(newer_state(peer.layout), local, keep_local_work=True)

    as_float32 = flat({name: tensor.float() for name, tensor in local.items()})
    assert report.parameters is not None
    np.testing.assert_array_equal(
        flat(dict(report.parameters)), flat(model(seed=50)) + (as_float32 - flat(model()))
    )


def test_discarding_leaves_the_new_anchor_and_no_tokens() -> None:
    peer = Peer()
    state = newer_state(peer.layout)
    peer.diloco.count(num_steps=4, num_tokens=60)

    report = peer.diloco.adopt(state, trained(model(), seed=1), keep_local_work=False)

    assert report.parameters is not None
    assert report.verdict is Verdict.DISCARDED
    np.testing.assert_array_equal(flat(dict(report.parameters)), flat(model(seed=50)))
    assert (peer.diloco.num_tokens, peer.diloco.inner_step) == (0, 0)
    assert peer.diloco.state is state


def test_a_joiner_takes_the_others_place_in_the_span_but_not_their_tokens() -> None:
    peer = Peer()

    peer.diloco.align(7)

    assert (peer.diloco.inner_step, peer.diloco.num_tokens) == (7, 0)


@pytest.mark.parametrize(
    ("theirs", "taken"), [(0, 0), (1, 1), (9, 9), (10, 9), (11, 1), (20, 9), (23, 3)]
)
def test_the_place_is_within_the_span_with_a_step_left_to_take(theirs: int, taken: int) -> None:
    peer = Peer(num_fragments=2)  # 10 inner steps a round

    peer.diloco.align(theirs)

    assert peer.diloco.inner_step == taken


def test_no_state_is_adopted_while_a_round_is_in_flight() -> None:
    peer = Peer()
    peer.begin(model(1))

    with pytest.raises(RuntimeError, match="in flight"):
        peer.diloco.adopt(peer.diloco.state, model(1), keep_local_work=True)


def next_state(layout: Layout, *contributors: str, outer_step: int = 1) -> OuterState:
    fragments = OuterState.initial(layout, model(seed=50)).fragments
    return OuterState(OuterStep(outer_step), 900, fragments, contributors)


def miss_a_round(peer: Peer) -> dict[str, torch.Tensor]:
    """Take part in a round that ends without an average; return what was contributed."""
    local = trained(model(), seed=1)
    peer.begin(local)
    peer.fail(local)
    return local


@pytest.mark.parametrize("on_missed_round", ["rebase", "discard"])
def test_work_that_the_others_have_averaged_is_committed_and_counts_once(
    on_missed_round: str,
) -> None:
    peer = Peer()
    local = miss_a_round(peer)

    state = next_state(peer.layout, "another", PEER_ID)
    keep = on_missed_round == "rebase"
    report = peer.diloco.adopt(state, local, keep_local_work=keep, peer_id=PEER_ID)

    assert report.verdict is Verdict.COMMITTED
    assert report.parameters is not None
    np.testing.assert_array_equal(flat(dict(report.parameters)), flat(model(seed=50)))
    assert (peer.diloco.num_tokens, peer.diloco.inner_step) == (0, 0)


def test_of_several_fragments_only_the_averaged_one_is_committed() -> None:
    peer = Peer(num_fragments=2)
    local = miss_a_round(peer)

    state = next_state(peer.layout, PEER_ID)
    report = peer.diloco.adopt(state, local, keep_local_work=True, peer_id=PEER_ID)

    assert report.verdict is Verdict.COMMITTED
    assert report.parameters is not None
    first = peer.layout.pick(0, local)
    others = [name for name in local if name not in first]
    assert first
    assert others
    for name in first:
        assert torch.equal(report.parameters[name], model(seed=50)[name])
    for name in others:
        progress = local[name] - model()[name]
        assert torch.equal(report.parameters[name], progress + model(seed=50)[name])


def test_work_of_a_round_that_was_given_up_with_its_averager_counts_once_too() -> None:
    peer = Peer()
    local = trained(model(), seed=1)
    peer.begin(local)
    peer.diloco.replace_averager(peer.averager)

    state = next_state(peer.layout, PEER_ID)
    report = peer.diloco.adopt(state, local, keep_local_work=True, peer_id=PEER_ID)

    assert report.verdict is Verdict.COMMITTED
    assert peer.diloco.num_tokens == 0


def test_work_that_the_others_have_averaged_does_not_take_later_work_with_it() -> None:
    peer = Peer()
    local = miss_a_round(peer)
    peer.diloco.count(num_steps=1, num_tokens=7)

    state = next_state(peer.layout, PEER_ID)
    report = peer.diloco.adopt(state, local, keep_local_work=True, peer_id=PEER_ID)

    assert report.verdict is Verdict.REBASED
    assert peer.diloco.num_tokens == 107


@pytest.mark.parametrize(
    ("contributors", "outer_step"),
    [
        pytest.param(("another",), 1, id="without this peer"),
        pytest.param((), 1, id="nobody is known"),
        pytest.param((PEER_ID,), 2, id="of another outer step"),
    ],
)
def test_work_that_the_others_have_not_averaged_is_rebased(
    contributors: tuple[str, ...], outer_step: int
) -> None:
    peer = Peer()
    local = miss_a_round(peer)

    state = next_state(peer.layout, *contributors, outer_step=outer_step)
    report = peer.diloco.adopt(state, local, keep_local_work=True, peer_id=PEER_ID)

    assert report.verdict is Verdict.REBASED
    assert peer.diloco.num_tokens == 100


def test_a_round_of_an_earlier_outer_step_says_nothing_about_the_work_since() -> None:
    peer = Peer()
    local = miss_a_round(peer)
    peer.begin(local)
    after = peer.average(local)
    assert after.parameters is not None
    peer.diloco.count(num_steps=20, num_tokens=7)

    state = next_state(peer.layout, PEER_ID, outer_step=2)
    local = dict(after.parameters)
    report = peer.diloco.adopt(state, local, keep_local_work=True, peer_id=PEER_ID)

    assert report.verdict is Verdict.REBASED


def test_work_that_replaced_what_was_thrown_away_is_not_taken_for_committed() -> None:
    peer = Peer()
    local = miss_a_round(peer)
    absurd = {name: tensor * float("nan") for name, tensor in local.items()}
    assert peer.begin(absurd) is Verdict.DISCARDED
    peer.diloco.count(num_steps=10, num_tokens=7)

    state = next_state(peer.layout, PEER_ID)
    report = peer.diloco.adopt(state, local, keep_local_work=True, peer_id=PEER_ID)

    assert report.verdict is Verdict.REBASED
    assert peer.diloco.num_tokens == 7
