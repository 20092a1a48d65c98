"""The averager over hivemind keeps the promises of all averagers, but for one."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from opendiloco.averaging.protocol import Averager, RoundRequest, RoundResult
from tests.contracts.averager_contract import AveragerContract, SwarmOf, run_round
from tests.support.swarm import Node, nodes


class PublishingAverager(Averager):
    """Tells the others by the progress record that its peer is ready, as a peer does."""

    def __init__(self, node: Node) -> None:
        assert node.averager is not None
        self._node = node
        self._averager = node.averager

    @override
    def begin(self, request: RoundRequest) -> Future[RoundResult]:
        future = self._averager.begin(request)
        self._node.tracker.update(state="averaging", outer_step=request.outer_step)
        return future

    @override
    def close(self) -> None:
        self._averager.close()


@pytest.mark.swarm
class TestHivemindAverager(AveragerContract):
    rtol = 2e-6  # hivemind sums and divides in float32

    @pytest.fixture
    def swarm_of(self, tmp_path: Path) -> Iterator[SwarmOf]:
        with ExitStack() as stack:

            def make(count: int, fragment_sizes: Sequence[int]) -> list[PublishingAverager]:
                made = stack.enter_context(
                    nodes(count, tmp_path, fragment_sizes=fragment_sizes, codec="none")
                )
                for node in made:
                    node.tracker.update(state="averaging", outer_step=0)
                return [PublishingAverager(node) for node in made]

            yield make

    @override
    def test_all_members_hold_the_same_bytes(self, swarm_of: SwarmOf) -> None:
        """They do not yet: each adds the difference to its own values. It stays rounding."""
        averagers = swarm_of(3, [5000])

        ended = run_round(averagers, 5000)

        averages = [result.average.numpy() for result in ended if result.average is not None]
        assert len(averages) == 3
        for average in averages[1:]:
            np.testing.assert_allclose(average, averages[0], rtol=2e-6, atol=2e-6)
