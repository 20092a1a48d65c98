"""What every averager makes of contributions that are at the bounds, or beyond them.

Used like :mod:`tests.contracts.averager_contract`, with the same fixture.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from opendiloco.averaging.protocol import Averager, RoundOutcome, RoundRequest, RoundResult
from tests.contracts.averager_contract import (
    WEIGHTS,
    Facts,
    SwarmOf,
    contribution,
    request,
    results,
)
from tests.support import reference

LARGEST_CHANGE = 32752.0
"""What a contribution may be at most: half of what fp16 can hold."""


def run_round_with(
    averagers: Sequence[Averager], last: RoundRequest, *, size: int
) -> tuple[list[RoundResult], RoundResult]:
    """Let all members average, the last one as it is told; returns the others' results and its."""
    others = averagers[:-1]
    futures = [averager.begin(request(member, size)) for member, averager in enumerate(others)]
    *ended, of_last = results([*futures, averagers[-1].begin(last)])
    return ended, of_last


def lying_request(size: int, *, weight: float) -> RoundRequest:
    """Return a request whose weight no honest peer can announce."""
    made = request(2, size)
    object.__setattr__(made, "weight", weight)
    return made


def fill_with(values: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return what writes these values, of any dtype, as a contribution."""

    def fill(out: torch.Tensor) -> None:
        out.copy_(values)

    return fill


class BoundsContract(Facts):
    """The facts about honest members."""

    def test_contributions_as_large_as_allowed_are_averaged(self, swarm_of: SwarmOf) -> None:
        largest = torch.full((10,), LARGEST_CHANGE)
        averagers = swarm_of(2, [10])

        ended = results(
            [
                averager.begin(request(member, 10, fill=fill_with(largest)))
                for member, averager in enumerate(averagers)
            ]
        )

        for result in ended:
            self.assert_close(result, np.full(10, LARGEST_CHANGE), largest=LARGEST_CHANGE)

    def test_contributions_from_bfloat16_are_averaged_as_they_are(self, swarm_of: SwarmOf) -> None:
        size = 1000
        averagers = swarm_of(2, [size])
        rounded = [contribution(member, size).bfloat16() for member in range(2)]

        ended = results(
            [
                averager.begin(request(member, size, fill=fill_with(rounded[member])))
                for member, averager in enumerate(averagers)
            ]
        )

        expected = reference.weighted_mean([r.float().numpy() for r in rounded], WEIGHTS[:2])
        for result in ended:
            self.assert_close(result, expected)

    @pytest.mark.timeout(300)
    def test_members_with_fragments_of_other_sizes_never_average(self, swarm_of: SwarmOf) -> None:
        sizes = [10, 20]
        averagers = swarm_of(2, sizes)

        ended = results(
            [
                averager.begin(request(member, sizes[member], fragment=member))
                for member, averager in enumerate(averagers)
            ]
        )

        assert all(result.outcome is not RoundOutcome.AVERAGED for result in ended)


class RefusalContract(Facts):
    """The facts about members that play by no rules."""

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30, 2 * LARGEST_CHANGE])
    def test_a_contribution_that_is_not_finite_or_absurd_is_left_out(
        self, swarm_of: SwarmOf, bad: float
    ) -> None:
        size = 1000
        averagers = swarm_of(3, [size])

        def fill(out: torch.Tensor) -> None:
            out.copy_(contribution(2, size))
            out[size // 2] = bad

        ended, of_bad = run_round_with(averagers, request(2, size, fill=fill), size=size)

        vectors = [contribution(member, size).numpy() for member in range(2)]
        assert of_bad.outcome is RoundOutcome.FAILED
        for result in ended:
            assert (result.num_peers, result.total_weight) == (2, 400.0), result.dropped
            self.assert_close(result, reference.weighted_mean(vectors, WEIGHTS[:2]))

    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), 1e30])
    def test_a_member_that_announces_a_senseless_weight_is_left_out(
        self, swarm_of: SwarmOf, bad: float
    ) -> None:
        size = 1000
        averagers = swarm_of(3, [size])

        ended, of_bad = run_round_with(averagers, lying_request(size, weight=bad), size=size)

        vectors = [contribution(member, size).numpy() for member in range(2)]
        assert of_bad.outcome is RoundOutcome.FAILED
        for result in ended:
            assert (result.num_peers, result.total_weight) == (2, 400.0), result.dropped
            self.assert_close(result, reference.weighted_mean(vectors, WEIGHTS[:2]))
