"""Outer steps over real hivemind equal DiLoCo as published, whatever the number of peers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from opendiloco.averaging.protocol import RoundOutcome
from opendiloco.diloco import DiLoCo, OuterReport, Verdict, Weighting
from opendiloco.outer import NesterovConfig
from opendiloco.schedule import OuterSchedule
from opendiloco.state import OuterState
from opendiloco.tensors import Layout
from tests.support import reference
from tests.support.swarm import Node, nodes

pytestmark = pytest.mark.swarm

SHAPES = {"embed": (40, 25), "layers.0.w": (1_100_000,), "head": (7,)}
LAYOUT = Layout.of(SHAPES)
NUM_STEPS = 3
# Shares of the largest pseudo-gradient: one rounding of the sum in float32; and in fp16 one of
# every contribution and one of the difference that hivemind sends back.
TOLERANCE = {"none": 4 * 2.0**-24, "fp16": 2 * 2.0**-11}


def vector(seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(LAYOUT.num_params, generator=generator)


def tokens(peer: int, step: int) -> int:
    return 100 * (peer + 1) + 10 * step


class TrainingPeer:
    """A peer whose inner steps add a vector that the test knows."""

    def __init__(self, index: int, node: Node, weighting: Weighting) -> None:
        assert node.averager is not None
        self.index = index
        self.node = node
        self.model = vector(0, 1.0)
        self.diloco = DiLoCo(
            OuterState.initial(LAYOUT, LAYOUT.views(0, self.model)),
            LAYOUT,
            averager=node.averager,
            schedule=OuterSchedule(inner_steps=1),
            outer=NesterovConfig(lr=0.7, momentum=0.9),
            weighting=weighting,
        )

    def take_outer_step(self, step: int) -> OuterReport:
        self.model += vector(100 * step + self.index + 1, 0.01)
        self.diloco.count(num_steps=1, num_tokens=tokens(self.index, step))
        local = LAYOUT.views(0, self.model)
        self.node.tracker.update(state="averaging", outer_step=step)
        assert self.diloco.begin_round(local) is None
        report = self.diloco.finish_round(local)
        self.node.tracker.update(state="training", outer_step=report.outer_step)
        assert report.parameters is not None
        for name, tensor in LAYOUT.views(0, self.model).items():
            tensor.copy_(report.parameters[name])
        return report


@pytest.mark.parametrize("weighting", [Weighting.TOKENS, Weighting.EQUAL])
@pytest.mark.parametrize("codec", ["none", "fp16"])
@pytest.mark.parametrize("num_peers", [1, 2, 3])
def test_every_anchor_equals_the_reference(
    tmp_path: Path, num_peers: int, codec: str, weighting: Weighting
) -> None:
    deltas = [
        [vector(100 * step + peer + 1, 0.01).numpy() for peer in range(num_peers)]
        for step in range(NUM_STEPS)
    ]
    by_tokens = weighting is Weighting.TOKENS
    weights = [
        [float(tokens(peer, step)) if by_tokens else 1.0 for peer in range(num_peers)]
        for step in range(NUM_STEPS)
    ]
    expected = reference.trajectory(vector(0, 1.0).numpy(), deltas, weights)

    with (
        nodes(num_peers, tmp_path, fragment_sizes=LAYOUT.fragment_sizes, codec=codec) as made,
        ThreadPoolExecutor(num_peers) as pool,
    ):
        peers = [TrainingPeer(index, node, weighting) for index, node in enumerate(made)]
        reports = [
            list(pool.map(TrainingPeer.take_outer_step, peers, [step] * num_peers))
            for step in range(NUM_STEPS)
        ]

    outcome = RoundOutcome.AVERAGED if num_peers > 1 else RoundOutcome.ALONE
    for step, step_reports in enumerate(reports):
        for report in step_reports:
            assert report.verdict is Verdict.COMMITTED
            assert report.round is not None
            assert report.round.outcome is outcome
            assert report.round.total_weight == sum(weights[step])
    # Rounding errors of earlier steps are carried on by the momentum; anchors are of size 1.
    largest = max(float(np.abs(np.stack(step)).max()) for step in deltas)
    allowed = 10 * TOLERANCE[codec] * largest + 10 * 2.0**-24 * 6
    for peer in peers:
        state = peer.diloco.state
        error = np.abs(state.fragments[0].anchor.numpy() - expected.anchors[-1]).max()
        assert error < allowed
        assert state.num_tokens == sum(
            tokens(other, step) for other in range(num_peers) for step in range(NUM_STEPS)
        )
