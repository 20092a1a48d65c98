"""One peer's outer loop: what is sent, committed and carried."""

import numpy as np
import pytest
import torch

from opendiloco import diloco as diloco_module
from opendiloco.diloco import DiLoCo, Verdict, Weighting
from opendiloco.errors import SchemaMismatchError, SwarmLostError
from opendiloco.outer import NesterovConfig
from opendiloco.schedule import OuterSchedule
from opendiloco.state import OuterState
from opendiloco.tensors import Layout
from opendiloco.units import Seconds
from tests.support import reference
from tests.support.averagers import ManualAverager
from tests.support.outer_loop import Peer, flat, model, trained


def test_a_peer_contributes_anchor_minus_local() -> None:
    peer = Peer()
    local = trained(model(), seed=1)

    peer.begin(local)

    np.testing.assert_array_equal(peer.contribution(), flat(model()) - flat(local))


def test_every_attempt_is_given_the_same_contribution() -> None:
    peer = Peer()
    peer.begin(trained(model(), seed=1))

    first, second = peer.contribution(), peer.contribution()

    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("weighting", "weight"), [(Weighting.TOKENS, 300.0), (Weighting.EQUAL, 1.0)]
)
def test_the_weight_is_the_tokens_or_equal(weighting: Weighting, weight: float) -> None:
    peer = Peer(weighting=weighting)

    peer.begin(trained(model(), seed=1), num_tokens=300)

    request = peer.averager.requests[0]
    assert (request.weight, request.num_tokens) == (weight, 300)


def test_a_round_is_for_peers_that_start_from_the_same_state() -> None:
    peer, other = Peer(), Peer()
    anchor = other.diloco.state.fragments[0].anchor
    anchor[3] += 1e-3

    peer.begin(trained(model(), seed=1))
    other.begin(trained(model(), seed=1))

    ours, theirs = peer.averager.requests[0].lineage, other.averager.requests[0].lineage
    assert ours == peer.diloco.state.digest[:16]
    assert ours != theirs


def test_a_commit_moves_the_anchor_as_the_reference_does() -> None:
    peer = Peer()
    local = trained(model(), seed=1)
    peer.begin(local)

    report = peer.average(local, num_tokens=700)

    expected, momentum = reference.outer_step(
        flat(model()), np.zeros(flat(model()).size), [flat(local)], [1.0]
    )
    after = peer.diloco.state.fragments[0]
    assert report.verdict is Verdict.COMMITTED
    assert (peer.diloco.state.outer_step, peer.diloco.state.num_tokens) == (1, 700)
    np.testing.assert_allclose(after.anchor, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(after.momentum, momentum, rtol=1e-6, atol=1e-6)


def test_after_a_commit_the_model_goes_on_from_the_new_anchor_with_no_tokens_left() -> None:
    peer = Peer()
    local = trained(model(), seed=1)
    peer.begin(local)

    report = peer.average(local)

    assert report.parameters is not None
    np.testing.assert_array_equal(
        flat(dict(report.parameters)), peer.diloco.state.fragments[0].anchor
    )
    assert (peer.diloco.num_tokens, peer.diloco.inner_step) == (0, 0)
    assert not peer.diloco.in_flight


def test_a_failed_round_changes_nothing_to_the_bit() -> None:
    peer = Peer()
    before, digest = peer.diloco.state, peer.diloco.state.digest
    local = trained(model(), seed=1)
    peer.begin(local)

    report = peer.fail(local)

    assert (report.verdict, report.parameters) == (Verdict.CARRIED, None)
    assert peer.diloco.state is before
    assert OuterState(before.outer_step, 0, before.fragments).digest == digest


def test_the_round_after_a_failed_one_covers_the_work_and_tokens_of_both_spans() -> None:
    peer = Peer()
    local = trained(model(), seed=1)
    peer.begin(local, num_tokens=100)
    peer.fail(local)
    further = trained(local, seed=2)

    peer.begin(further, num_tokens=40)

    request = peer.averager.requests[1]
    assert (request.outer_step, request.weight, request.num_tokens) == (0, 140.0, 140)
    np.testing.assert_array_equal(peer.contribution(), flat(model()) - flat(further))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e6, -4e4])
def test_parameters_that_are_not_finite_or_absurd_are_never_sent(bad: float) -> None:
    peer = Peer()
    local = trained(model(), seed=1)
    local["layers.1.w"][2, 3] = bad

    verdict = peer.begin(local)

    assert verdict is Verdict.DISCARDED
    assert peer.averager.requests == []
    assert not peer.diloco.in_flight
    assert (peer.diloco.num_tokens, peer.diloco.inner_step) == (0, 0)


def test_a_large_change_that_float16_can_hold_is_sent() -> None:
    peer = Peer()
    local = model()
    local["layers.1.w"][2, 3] += 32000.0

    assert peer.begin(local) is None


def test_parameters_of_another_model_are_refused() -> None:
    peer = Peer()
    local = trained(model(), seed=1) | {"head.w": torch.zeros(2)}

    with pytest.raises(SchemaMismatchError, match=r"head\.w"):
        peer.begin(local)


def test_finishing_without_a_round_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no round has begun"):
        Peer().diloco.finish_round(model())


def test_an_averager_that_never_answers_means_that_the_swarm_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diloco_module, "_GRACE", Seconds(0.01))
    peer = Peer()
    peer.begin(trained(model(), seed=1))

    with pytest.raises(SwarmLostError, match="start this peer again"):
        peer.diloco.finish_round(model())


@pytest.mark.parametrize("num_fragments", [2, 3])
def test_a_commit_leaves_other_fragments_alone_to_the_bit(num_fragments: int) -> None:
    layers = {f"layers.{number}.w": (5,) for number in range(num_fragments)}
    layout = Layout.of(layers, num_fragments=num_fragments)
    start = {name: torch.randn(shape) for name, shape in layers.items()}
    averager = ManualAverager()
    diloco = DiLoCo(
        OuterState.initial(layout, start),
        layout,
        averager=averager,
        schedule=OuterSchedule(num_fragments, num_fragments),
        outer=NesterovConfig(),
    )
    before = diloco.state

    diloco.count(num_steps=1, num_tokens=1)
    diloco.begin_round(start)
    averager.average(torch.ones(5))
    report = diloco.finish_round(start)

    assert averager.requests[0].fragment == 0
    assert report.parameters is not None
    assert list(report.parameters) == ["layers.0.w"]
    assert diloco.state.fragments[1:] == before.fragments[1:]


def test_with_overlap_the_export_is_a_snapshot() -> None:
    peer = Peer(overlap=3)
    local = trained(model(), seed=1)
    exported = flat(local)
    peer.begin(local)

    for tensor in local.values():
        tensor.add_(1.0)

    np.testing.assert_array_equal(peer.contribution(), flat(model()) - exported)


def test_with_overlap_the_model_becomes_half_anchor_and_half_local() -> None:
    peer = Peer(overlap=3)
    exported = trained(model(), seed=1)
    peer.begin(exported)
    local = trained(exported, seed=2)
    peer.diloco.count(num_steps=3, num_tokens=30)

    report = peer.average(local)

    anchor, _ = reference.outer_step(
        flat(model()), np.zeros(flat(model()).size), [flat(exported)], [1.0]
    )
    assert report.parameters is not None
    np.testing.assert_allclose(
        flat(dict(report.parameters)), 0.5 * flat(local) + 0.5 * anchor, rtol=1e-6, atol=1e-6
    )


def test_with_overlap_the_steps_since_the_export_count_in_the_next_round() -> None:
    peer = Peer(overlap=3)
    local = trained(model(), seed=1)
    peer.begin(local)
    peer.diloco.count(num_steps=3, num_tokens=30)

    peer.average(local)

    assert (peer.diloco.inner_step, peer.diloco.num_tokens) == (3, 30)


def test_with_overlap_a_failed_round_keeps_all_steps_and_tokens() -> None:
    peer = Peer(overlap=3)
    local = trained(model(), seed=1)
    peer.begin(local)
    peer.diloco.count(num_steps=3, num_tokens=30)

    peer.fail(local)

    assert (peer.diloco.inner_step, peer.diloco.num_tokens) == (13, 130)
