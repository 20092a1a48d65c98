"""Peers that cannot be dialled, and peers that only help, in real rounds."""

import functools
from pathlib import Path

import pytest
import torch

from opendiloco.averaging.group import Role
from opendiloco.averaging.protocol import RoundOutcome, RoundRequest, RoundResult
from opendiloco.units import OuterStep, Seconds
from tests.support.swarm import Node, nodes

pytestmark = pytest.mark.swarm

FULL, CLIENT, AUXILIARY = Role.FULL, Role.CLIENT, Role.AUXILIARY
SIZE = 100_000


def write(vector: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(vector)


def run_round(
    made: list[Node], vectors: list[torch.Tensor], *, timeout: float
) -> list[RoundResult]:
    futures = []
    for node, vector in zip(made, vectors, strict=True):
        assert node.averager is not None
        node.tracker.update(state="averaging", outer_step=0)
        fill = functools.partial(write, vector)
        request = RoundRequest(OuterStep(0), 0, fill, 1.0, 5, Seconds(timeout))
        futures.append(node.averager.begin(request))
    return [future.result(timeout=timeout + 30.0) for future in futures]


@pytest.mark.parametrize("roles", [[FULL, CLIENT], [FULL, CLIENT, CLIENT], [FULL, FULL, CLIENT]])
def test_peers_that_cannot_be_dialled_end_with_the_same_average(
    tmp_path: Path, roles: list[Role]
) -> None:
    vectors = [torch.randn(SIZE, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    vectors = vectors[: len(roles)]

    with nodes(len(roles), tmp_path, fragment_sizes=[SIZE], roles=roles) as made:
        ended = run_round(made, vectors, timeout=60.0)

        mean = torch.stack(vectors).double().mean(0).float()
        assert [result.outcome for result in ended] == [RoundOutcome.AVERAGED] * len(roles)
        for result in ended:
            assert result.average is not None
            assert ended[0].average is not None
            assert torch.equal(result.average, ended[0].average)
            torch.testing.assert_close(result.average, mean, rtol=2e-7, atol=1e-9)


def test_an_auxiliary_lets_two_peers_average_that_cannot_be_dialled(tmp_path: Path) -> None:
    vectors = [torch.full((SIZE,), 100.0), torch.full((SIZE,), 1.0), torch.full((SIZE,), 3.0)]

    with nodes(3, tmp_path, fragment_sizes=[SIZE], roles=[AUXILIARY, CLIENT, CLIENT]) as made:
        ended = run_round(made, vectors, timeout=60.0)

        assert [result.outcome for result in ended] == [RoundOutcome.AVERAGED] * 3
        assert ended[0].average is None
        for result in ended[1:]:
            assert result.average is not None
            assert (result.average == 2.0).all()
            assert (result.num_peers, result.num_tokens) == (2, 10)


def test_two_peers_that_cannot_be_dialled_give_up_in_time(tmp_path: Path) -> None:
    with nodes(
        3, tmp_path, fragment_sizes=[SIZE], roles=[FULL, CLIENT, CLIENT], patience=1.0
    ) as made:
        made[0].tracker.close()  # it says goodbye: the two others are alone with each other
        ended = run_round(made[1:], [torch.ones(SIZE)] * 2, timeout=20.0)

    assert [result.outcome for result in ended] == [RoundOutcome.FAILED] * 2
    assert "found nobody" in ended[0].reason
