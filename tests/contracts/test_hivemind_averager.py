"""The averager over hivemind keeps the promises of all averagers."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest
from typing_extensions import override

from opendiloco.averaging.options import AveragingOptions
from opendiloco.averaging.protocol import Averager, RoundOutcome, RoundRequest, RoundResult
from opendiloco.averaging.swarm import HivemindAverager
from opendiloco.units import Seconds
from tests.contracts.averager_contract import AveragerContract, SwarmOf, run_round
from tests.contracts.bounds_contract import BoundsContract, RefusalContract
from tests.support.swarm import Node, nodes

_FEW = 4


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
class TestHivemindAverager(AveragerContract, BoundsContract, RefusalContract):
    @pytest.fixture
    def swarm_of(self, tmp_path: Path) -> Iterator[SwarmOf]:
        with ExitStack() as stack:

            def make(count: int, fragment_sizes: Sequence[int]) -> list[PublishingAverager]:
                patience = 3.0 if count <= _FEW else 10.0  # they share two cores
                made = stack.enter_context(
                    nodes(
                        count,
                        tmp_path,
                        fragment_sizes=fragment_sizes,
                        codec="none",
                        patience=patience,
                    )
                )
                for node in made:
                    node.tracker.update(state="averaging", outer_step=0)
                return [PublishingAverager(node) for node in made]

            yield make

    @pytest.mark.timeout(300)
    def test_members_with_other_codecs_never_meet(self, tmp_path: Path) -> None:
        with nodes(2, tmp_path) as made, ExitStack() as stack:
            averagers = []
            for node, codec in zip(made, ["none", "fp16"], strict=True):
                node.averager = HivemindAverager(
                    node.dht.dht,
                    [10],
                    node.tracker,
                    run_key="test-f",
                    options=AveragingOptions(codec=codec, matchmaking=Seconds(1.0)),
                    leaving=threading.Event(),
                )
                stack.callback(node.averager.close)
                averagers.append(PublishingAverager(node))

            ended = run_round(averagers, 10)

        assert [result.outcome for result in ended] == [RoundOutcome.FAILED] * 2
