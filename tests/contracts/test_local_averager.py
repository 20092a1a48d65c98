"""The averager of tests and simulation keeps the promises of all averagers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from opendiloco.averaging.local import LocalAverager, LocalSwarm
from opendiloco.units import Seconds
from tests.contracts.averager_contract import AveragerContract, SwarmOf
from tests.contracts.bounds_contract import BoundsContract, RefusalContract


class TestLocalAverager(AveragerContract, BoundsContract, RefusalContract):
    @pytest.fixture
    def swarm_of(self) -> Iterator[SwarmOf]:
        with ExitStack() as stack:

            def make(count: int, fragment_sizes: Sequence[int]) -> list[LocalAverager]:
                swarm = LocalSwarm(fragment_sizes, patience=Seconds(1.0))
                averagers = [swarm.join() for _ in range(count)]
                for averager in averagers:
                    stack.callback(averager.close)
                return averagers

            yield make
