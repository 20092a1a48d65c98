"""Several peers' outer loops together: DiLoCo as published, and replicas that stay equal."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from opendiloco.averaging.local import LocalSwarm
from opendiloco.diloco import DiLoCo, OuterReport, Verdict, Weighting
from opendiloco.outer import NesterovConfig
from opendiloco.schedule import OuterSchedule
from opendiloco.state import OuterState
from opendiloco.tensors import Layout
from opendiloco.units import Seconds
from tests.support import reference
from tests.support.averagers import UnreliableAverager

SIZE = 50
NUM_ROUNDS = 5
SHAPES = {f"layers.{number}.w": (SIZE,) for number in range(3)}
Model = dict[str, torch.Tensor]


def seed_model() -> Model:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def progress(peer: int, span: int) -> Model:
    """What the inner steps of a peer add to its parameters; peers go different ways."""
    generator = torch.Generator().manual_seed(1000 * span + peer)
    return {name: 0.02 * torch.randn(s, generator=generator) for name, s in SHAPES.items()}


def tokens(peer: int, span: int) -> int:
    return 100 * (peer + 1) + 10 * span


def flat(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([tensors[name].numpy() for name in SHAPES])


class Peers:
    """Peers in one process, with random vectors for inner steps."""

    def __init__(
        self,
        count: int,
        *,
        num_fragments: int = 1,
        overlap: int = 0,
        weighting: Weighting = Weighting.TOKENS,
        failing: Mapping[int, Sequence[int]] | None = None,
        patience: float = 5.0,
    ) -> None:
        self.layout = Layout.of(SHAPES, num_fragments=num_fragments)
        self.schedule = OuterSchedule(4 * num_fragments, num_fragments, overlap)
        self.swarm = LocalSwarm(self.layout.fragment_sizes, patience=Seconds(patience))
        self.averagers = [
            UnreliableAverager(self.swarm.join(), (failing or {}).get(peer, ()))
            for peer in range(count)
        ]
        self.models = [seed_model() for _ in range(count)]
        self.diloco = [
            DiLoCo(
                OuterState.initial(self.layout, seed_model()),
                self.layout,
                averager=averager,
                schedule=self.schedule,
                outer=NesterovConfig(),
                weighting=weighting,
            )
            for averager in self.averagers
        ]
        self.span = 0

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        for averager in self.averagers:
            averager.close()

    def train(self, share: float = 1.0) -> None:
        """Take inner steps: add this share of the span's progress to every model."""
        for peer, parameters in enumerate(self.models):
            for name, delta in progress(peer, self.span).items():
                parameters[name] = parameters[name] + share * delta
            num_tokens = round(share * tokens(peer, self.span))
            self.diloco[peer].count(
                num_steps=round(share * self.schedule.steps_per_round), num_tokens=num_tokens
            )

    def begin(self) -> list[Verdict | None]:
        self.span += 1
        return [d.begin_round(m) for d, m in zip(self.diloco, self.models, strict=True)]

    def finish(self) -> list[OuterReport]:
        reports = [d.finish_round(m) for d, m in zip(self.diloco, self.models, strict=True)]
        for parameters, report in zip(self.models, reports, strict=True):
            parameters.update(report.parameters or {})
        return reports

    def digests(self) -> set[str]:
        return {diloco.state.digest for diloco in self.diloco}

    def anchor(self, peer: int) -> np.ndarray:
        return flat(self.diloco[peer].state.parameters(self.layout))


def expected_anchor(count: int, weights: Sequence[Sequence[float]]) -> np.ndarray:
    deltas = [[flat(progress(peer, span)) for peer in range(count)] for span in range(len(weights))]
    return reference.trajectory(flat(seed_model()), deltas, weights).anchors[-1]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("num_rounds", [1, NUM_ROUNDS])
def test_rounds_equal_published_diloco_to_float32_rounding(count: int, num_rounds: int) -> None:
    with Peers(count) as peers:
        for _ in range(num_rounds):
            peers.train()
            peers.begin()
            peers.finish()

    weights = [[tokens(p, span) for p in range(count)] for span in range(num_rounds)]
    expected = expected_anchor(count, weights)
    for peer in range(count):
        np.testing.assert_allclose(peers.anchor(peer), expected, rtol=1e-6, atol=3e-6)


def test_with_equal_weights_tokens_do_not_matter() -> None:
    with Peers(3, weighting=Weighting.EQUAL) as peers:
        peers.train()
        peers.begin()
        peers.finish()

    np.testing.assert_allclose(
        peers.anchor(0), expected_anchor(3, [[1.0] * 3]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(("num_fragments", "overlap"), [(1, 0), (2, 0), (3, 0), (3, 2), (1, 4)])
def test_replicas_are_equal_to_the_bit_after_every_round(num_fragments: int, overlap: int) -> None:
    with Peers(3, num_fragments=num_fragments, overlap=overlap) as peers:
        for number in range(NUM_ROUNDS):
            peers.train()
            peers.begin()
            if overlap:
                peers.train(share=overlap / peers.schedule.steps_per_round)
            reports = peers.finish()

            assert len(peers.digests()) == 1
            assert {report.outer_step for report in reports} == {number + 1}


def test_all_peers_tokens_are_in_the_states_count() -> None:
    with Peers(3) as peers:
        for _ in range(2):
            peers.train()
            peers.begin()
            peers.finish()

    expected = sum(tokens(peer, span) for peer in range(3) for span in range(2))
    assert {diloco.state.num_tokens for diloco in peers.diloco} == {expected}


@pytest.mark.parametrize("num_fragments", [2, 3])
def test_fragments_in_turn_equal_diloco_on_each(num_fragments: int) -> None:
    with Peers(2, num_fragments=num_fragments) as peers:
        for _ in range(num_fragments):
            peers.train()
            peers.begin()
            peers.finish()

    for fragment, specs in enumerate(peers.layout.fragments):
        names = [spec.name for spec in specs]
        spans = range(fragment + 1)  # fragment k is averaged after span k, for the first time
        deltas = [
            sum(np.concatenate([progress(peer, s)[n].numpy() for n in names]) for s in spans)
            for peer in range(2)
        ]
        start = np.concatenate([seed_model()[name].numpy() for name in names])
        weights = [tokens(peer, fragment) for peer in range(2)]
        expected, momentum = reference.outer_step(
            start, np.zeros_like(start), [start + delta for delta in deltas], weights
        )
        state = peers.diloco[0].state.fragments[fragment]
        np.testing.assert_allclose(state.anchor, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(state.momentum, momentum, rtol=1e-6, atol=1e-6)


def test_a_round_that_fails_for_all_loses_no_work() -> None:
    with Peers(2, failing={0: [0], 1: [0]}) as peers:
        peers.train()
        peers.begin()
        failed = peers.finish()
        peers.train()
        peers.begin()
        peers.finish()

    deltas = [flat(progress(peer, 0)) + flat(progress(peer, 1)) for peer in range(2)]
    weights = [tokens(peer, 0) + tokens(peer, 1) for peer in range(2)]
    expected = reference.trajectory(flat(seed_model()), [deltas], [weights]).anchors[-1]
    assert {report.verdict for report in failed} == {Verdict.CARRIED}
    assert len(peers.digests()) == 1
    np.testing.assert_allclose(peers.anchor(0), expected, rtol=1e-6, atol=2e-6)


def test_a_peer_with_nan_does_not_poison_the_others() -> None:
    with Peers(3, patience=0.1) as peers:
        peers.train()
        peers.models[1]["layers.0.w"][7] = float("nan")
        verdicts = peers.begin()
        healthy = (0, 2)
        for peer in healthy:
            peers.diloco[peer].finish_round(peers.models[peer])

    deltas = [flat(progress(peer, 0)) for peer in healthy]
    weights = [tokens(peer, 0) for peer in healthy]
    expected = reference.trajectory(flat(seed_model()), [deltas], [weights]).anchors[-1]
    assert verdicts == [None, Verdict.DISCARDED, None]
    for peer in healthy:
        np.testing.assert_allclose(peers.anchor(peer), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keep", [True, False])
def test_a_peer_that_missed_a_round_is_equal_again_after_the_next(*, keep: bool) -> None:
    with Peers(2, failing={1: [0]}, patience=0.1) as peers:
        peers.train()
        peers.begin()
        missed = peers.finish()[1]
        caught_up = peers.diloco[1].adopt(
            peers.diloco[0].state, peers.models[1], keep_local_work=keep
        )
        peers.models[1].update(caught_up.parameters or {})
        peers.train()
        peers.begin()
        peers.finish()

    assert missed.verdict is Verdict.CARRIED
    assert len(peers.digests()) == 1
    kept = tokens(1, 0) if keep else 0
    assert peers.diloco[1].state.num_tokens == tokens(0, 0) + tokens(0, 1) + tokens(1, 1) + kept


def test_it_finds_the_minimum_that_is_best_for_all_peers() -> None:
    generator = torch.Generator().manual_seed(5)
    minima = [torch.randn(3 * SIZE, generator=generator) for _ in range(3)]

    with Peers(3, weighting=Weighting.EQUAL) as peers:
        for _ in range(120):
            for parameters, minimum in zip(peers.models, minima, strict=True):
                for name, part in zip(SHAPES, minimum.split(SIZE), strict=True):
                    for _ in range(4):
                        parameters[name] = parameters[name] - 0.05 * (parameters[name] - part)
            for diloco in peers.diloco:
                diloco.count(num_steps=4, num_tokens=1)
            peers.begin()
            peers.finish()

    best = np.mean([minimum.numpy() for minimum in minima], axis=0)
    np.testing.assert_allclose(peers.anchor(0), best, atol=1e-3)
