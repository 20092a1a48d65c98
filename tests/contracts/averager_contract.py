"""What every averager promises, as facts that run on any of them.

A runner is a subclass whose name begins with ``Test`` and which gives the fixture ``swarm_of``
and, for a codec that rounds, another ``rtol``::

    class TestSomeAverager(AveragerContract):
        rtol = 2e-3

        @pytest.fixture
        def swarm_of(self) -> Iterator[SwarmOf]: ...

The fixture makes averagers that know of each other, all at outer step 0, and closes them
in the end. Where members learn from records how far the others are, the runner wraps the
averagers so that ``begin`` publishes the request's outer step.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest
import torch

from opendiloco.averaging.protocol import Averager, RoundOutcome, RoundRequest, RoundResult
from opendiloco.units import OuterStep, Seconds
from tests.support import reference

_ROUND = 30.0  # seconds for a round
_RESULT = 60.0  # seconds after which a test gives up
WEIGHTS = (100.0, 300.0, 50.0, 700.0, 20.0, 90.0, 410.0, 60.0)


class SwarmOf(Protocol):
    """Makes averagers that know of each other."""

    def __call__(self, count: int, fragment_sizes: Sequence[int]) -> Sequence[Averager]:
        """Return ``count`` members for fragments of so many elements."""
        ...


def contribution(member: int, size: int) -> torch.Tensor:
    """Return what a member contributes: normal numbers, different for every member."""
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + member))


def request(
    member: int,
    size: int,
    *,
    outer_step: int = 0,
    fragment: int = 0,
    fill: Callable[[torch.Tensor], None] | None = None,
) -> RoundRequest:
    """Return a member's part in a round, weighted with 100, 300, 50, ..."""

    def contribute(out: torch.Tensor) -> None:
        out.copy_(contribution(member, size))

    return RoundRequest(
        outer_step=OuterStep(outer_step),
        fragment=fragment,
        fill=fill or contribute,
        weight=WEIGHTS[member],
        num_tokens=int(WEIGHTS[member]),
        timeout=Seconds(_ROUND),
    )


def results(futures: Sequence[Future[RoundResult]]) -> list[RoundResult]:
    """Wait for the end of everybody's round."""
    return [future.result(timeout=_RESULT) for future in futures]


def run_round(
    averagers: Sequence[Averager], size: int, *, outer_step: int = 0, fragment: int = 0
) -> list[RoundResult]:
    """Let all members average at the same time."""
    return results(
        [
            averager.begin(request(member, size, outer_step=outer_step, fragment=fragment))
            for member, averager in enumerate(averagers)
        ]
    )


def digest_of(result: RoundResult) -> str:
    """Return the SHA-256 of an average's bytes."""
    assert result.average is not None
    return hashlib.sha256(result.average.numpy().tobytes()).hexdigest()


class Facts:
    """What the facts have in common.

    Attributes:
        rtol: How far an average may be from the exact one, relative to what went into it.
    """

    rtol = 1e-6

    def assert_close(
        self, result: RoundResult, expected: npt.NDArray[np.floating], *, largest: float = 5.0
    ) -> None:
        """Compare an average to its reference; ``largest`` bounds what was contributed."""
        assert result.average is not None
        np.testing.assert_allclose(
            result.average.numpy(), expected, rtol=self.rtol, atol=self.rtol * largest
        )


class AveragerContract(Facts):
    """The facts; see the module's docstring."""

    @pytest.mark.parametrize("count", [2, 3])
    def test_the_average_is_the_weighted_mean(self, swarm_of: SwarmOf, count: int) -> None:
        size = 1000
        averagers = swarm_of(count, [size])

        ended = run_round(averagers, size)

        vectors = [contribution(member, size).numpy() for member in range(count)]
        expected = reference.weighted_mean(vectors, WEIGHTS[:count])
        for result in ended:
            self.assert_close(result, expected)

    @pytest.mark.parametrize("size", [1, 7, 3_000_000])
    def test_any_size_can_be_averaged(self, swarm_of: SwarmOf, size: int) -> None:
        averagers = swarm_of(2, [size])

        ended = run_round(averagers, size)

        vectors = [contribution(member, size).numpy() for member in range(2)]
        expected = reference.weighted_mean(vectors, WEIGHTS[:2])
        for result in ended:
            self.assert_close(result, expected, largest=6.0)

    def test_all_members_hold_the_same_bytes(self, swarm_of: SwarmOf) -> None:
        averagers = swarm_of(3, [5000])

        ended = run_round(averagers, 5000)

        averages = [result.average for result in ended if result.average is not None]
        assert len(averages) == 3
        assert len({average.numpy().tobytes() for average in averages}) == 1

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.faults)])
    def test_all_members_hold_the_same_bytes_after_every_one_of_fifty_rounds(
        self, swarm_of: SwarmOf, count: int
    ) -> None:
        size = 3000
        averagers = swarm_of(count, [size])

        digests = []
        for step in range(50):
            ended = run_round(averagers, size, outer_step=step)
            digests.append({digest_of(result) for result in ended})

        assert [len(of_round) for of_round in digests] == [1] * 50

    def test_the_average_is_the_mean_in_float64_rounded_once(self, swarm_of: SwarmOf) -> None:
        size = 100_000
        averagers = swarm_of(3, [size])

        ended = run_round(averagers, size)

        vectors = [contribution(member, size).numpy() for member in range(3)]
        expected = reference.weighted_mean(vectors, WEIGHTS[:3]).astype(np.float32)
        for result in ended:
            assert result.average is not None
            np.testing.assert_array_max_ulp(result.average.numpy(), expected, maxulp=1)

    def test_a_result_says_whose_work_is_in_it(self, swarm_of: SwarmOf) -> None:
        averagers = swarm_of(3, [10])

        ended = run_round(averagers, 10)

        for result in ended:
            assert result.outcome is RoundOutcome.AVERAGED
            assert (result.num_peers, result.num_tokens) == (3, 450)
            assert result.contributors.keys() == ended[0].contributors.keys()
            assert sorted(result.contributors.values()) == sorted(WEIGHTS[:3])
            assert result.total_weight == 450.0
            assert result.attempts >= 1

    def test_the_average_is_a_flat_float32_vector_on_the_cpu(self, swarm_of: SwarmOf) -> None:
        averagers = swarm_of(2, [10])

        ended = run_round(averagers, 10)

        for result in ended:
            assert result.average is not None
            assert result.average.shape == (10,)
            assert result.average.dtype is torch.float32
            assert result.average.device.type == "cpu"

    def test_every_attempt_is_filled_with_the_fragments_size(self, swarm_of: SwarmOf) -> None:
        sizes = [10, 20]
        averagers = swarm_of(2, sizes)
        filled: list[list[tuple[int, ...]]] = [[], []]

        def fill_of(member: int) -> Callable[[torch.Tensor], None]:
            def fill(out: torch.Tensor) -> None:
                filled[member].append(tuple(out.shape))
                out.fill_(1.0)

            return fill

        ended = results(
            [
                averager.begin(request(member, 20, fragment=1, fill=fill_of(member)))
                for member, averager in enumerate(averagers)
            ]
        )

        for shapes, result in zip(filled, ended, strict=True):
            assert shapes == [(20,)] * max(1, result.attempts)

    def test_rounds_follow_each_other(self, swarm_of: SwarmOf) -> None:
        averagers = swarm_of(2, [100])

        ended = [run_round(averagers, 100, outer_step=step) for step in range(3)]

        vectors = [contribution(member, 100).numpy() for member in range(2)]
        expected = reference.weighted_mean(vectors, WEIGHTS[:2])
        for result in (result for in_round in ended for result in in_round):
            assert result.num_peers == 2
            self.assert_close(result, expected)

    @pytest.mark.parametrize("sizes", [[10, 20], [20, 10]])
    def test_fragments_of_different_sizes_are_averaged_in_turn(
        self, swarm_of: SwarmOf, sizes: list[int]
    ) -> None:
        averagers = swarm_of(2, sizes)

        for fragment, size in enumerate(sizes):
            ended = run_round(averagers, size, outer_step=fragment, fragment=fragment)

            vectors = [contribution(member, size).numpy() for member in range(2)]
            for result in ended:
                self.assert_close(result, reference.weighted_mean(vectors, WEIGHTS[:2]))

    def test_members_at_different_outer_steps_never_meet(self, swarm_of: SwarmOf) -> None:
        averagers = swarm_of(2, [10])

        ended = results(
            [
                averager.begin(request(member, 10, outer_step=member))
                for member, averager in enumerate(averagers)
            ]
        )

        for member, result in enumerate(ended):
            assert result.outcome is not RoundOutcome.AVERAGED
            assert result.num_peers == 1
            own = contribution(member, 10)
            assert result.average is None or torch.equal(result.average, own)

    def test_a_lone_member_is_alone_with_its_own_contribution(self, swarm_of: SwarmOf) -> None:
        (averager,) = swarm_of(1, [10])

        (result,) = run_round([averager], 10)

        assert result.outcome is RoundOutcome.ALONE
        assert (result.num_peers, result.total_weight, result.num_tokens) == (1, 100.0, 100)
        assert result.average is not None
        assert torch.equal(result.average, contribution(0, 10))

    def test_a_second_round_cannot_begin_while_one_runs(self, swarm_of: SwarmOf) -> None:
        averagers = swarm_of(2, [10])
        go_on = threading.Event()

        def fill(out: torch.Tensor) -> None:
            go_on.wait(_RESULT)
            out.copy_(contribution(0, 10))

        futures = [averagers[0].begin(request(0, 10, fill=fill))]
        try:
            with pytest.raises(RuntimeError, match="not finished"):
                averagers[0].begin(request(0, 10))
        finally:
            go_on.set()
            futures.append(averagers[1].begin(request(1, 10)))

        assert [result.num_peers for result in results(futures)] == [2, 2]

    def test_closing_twice_is_closing_once(self, swarm_of: SwarmOf) -> None:
        averagers = swarm_of(2, [10])
        run_round(averagers, 10)

        for averager in averagers:
            averager.close()
            averager.close()

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
    def test_a_weight_that_is_not_positive_and_finite_is_refused(self, bad: float) -> None:
        with pytest.raises(ValueError, match="weight must be positive and finite"):
            RoundRequest(OuterStep(0), 0, lambda _: None, bad, 1, Seconds(1.0))

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
    def test_a_timeout_that_is_not_positive_and_finite_is_refused(self, bad: float) -> None:
        with pytest.raises(ValueError, match="timeout must be positive and finite"):
            RoundRequest(OuterStep(0), 0, lambda _: None, 1.0, 1, Seconds(bad))
