"""A peer that dies in the middle of a round costs the others an attempt, not their average."""

import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hivemind.averaging.control import AveragingStage

from opendiloco.averaging.protocol import RoundOutcome, RoundRequest, RoundResult
from opendiloco.units import OuterStep, Seconds
from tests.support import reference
from tests.support.swarm import Node, nodes, wait_until

pytestmark = pytest.mark.swarm

SIZE = 20_000_000  # long enough on the wire to be hit in the middle
WEIGHTS = (100.0, 300.0, 50.0)


def contribution(member: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(member))


def begin(member: int, node: Node) -> Future[RoundResult]:
    assert node.averager is not None
    vector = contribution(member)
    node.tracker.update(state="averaging", outer_step=0)
    return node.averager.begin(
        RoundRequest(
            outer_step=OuterStep(0),
            fragment=0,
            fill=lambda out: out.copy_(vector),
            weight=WEIGHTS[member],
            num_tokens=int(WEIGHTS[member]),
            timeout=Seconds(90.0),
        )
    )


def exchanging(node: Node) -> bool:
    """Return whether the node's averager is in the middle of an all-reduce."""
    assert node.averager is not None
    control = node.averager.step_under_way
    return control is not None and control.stage is AveragingStage.RUNNING_ALLREDUCE


def test_survivors_of_a_death_in_mid_exchange_average_among_themselves(tmp_path: Path) -> None:
    with nodes(3, tmp_path, fragment_sizes=[SIZE], codec="none") as made:
        futures = [begin(member, node) for member, node in enumerate(made)]
        wait_until(lambda: exchanging(made[2]), "the exchange begins")

        victim = made[2].averager
        assert victim is not None
        was_exchanging = exchanging(made[2])
        for process in victim.processes:
            process.kill()
        began_at = time.monotonic()
        ended = [future.result(timeout=90.0) for future in futures[:2]]
        seconds = time.monotonic() - began_at

    assert was_exchanging
    vectors = [contribution(member).numpy() for member in range(2)]
    expected = reference.weighted_mean(vectors, WEIGHTS[:2])
    for result in ended:
        assert result.outcome is RoundOutcome.AVERAGED
        assert (result.num_peers, result.total_weight) == (2, 400.0)
        assert result.attempts >= 2
        assert result.average is not None
        np.testing.assert_allclose(result.average.numpy(), expected, rtol=2e-6, atol=2e-5)
    assert seconds < 60.0


def small_request(node: Node) -> Future[RoundResult]:
    assert node.averager is not None
    node.tracker.update(state="averaging", outer_step=3)
    return node.averager.begin(
        RoundRequest(OuterStep(3), 0, lambda out: out.fill_(1.0), 1.0, 1, Seconds(30.0))
    )


def test_a_claim_to_be_far_ahead_stops_nobody_once_it_is_not_believed(tmp_path: Path) -> None:
    with nodes(3, tmp_path, fragment_sizes=[10]) as made:
        honest, rogue = made[:2], made[2]
        rogue.tracker.update(outer_step=10**9)
        wait_until(
            lambda: all(node.tracker.view().ahead_of(OuterStep(3)) for node in honest),
            "the claim is seen",
        )
        believed = [future.result(60.0) for future in [small_request(node) for node in honest]]

        for node in honest:
            node.tracker.distrust(rogue.peer_id)
        doubted = [future.result(60.0) for future in [small_request(node) for node in honest]]

    assert [result.outcome for result in believed] == [RoundOutcome.FAILED] * 2
    assert [result.outcome for result in doubted] == [RoundOutcome.AVERAGED] * 2
    assert [result.num_peers for result in doubted] == [2, 2]
