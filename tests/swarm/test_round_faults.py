"""What a peer claims in its record, and does not prove, does not stop the others' rounds."""

from concurrent.futures import Future
from pathlib import Path

import pytest

from opendiloco.averaging.protocol import RoundOutcome, RoundRequest, RoundResult
from opendiloco.units import OuterStep, Seconds
from tests.support.swarm import Node, nodes, wait_until

pytestmark = pytest.mark.swarm


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
