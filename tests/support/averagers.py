"""Averagers whose rounds end as the test says."""

from collections.abc import Container
from concurrent.futures import Future

import torch
from typing_extensions import override

from opendiloco.averaging.protocol import Averager, RoundOutcome, RoundRequest, RoundResult


class ManualAverager(Averager):
    """Keeps every request; a round ends when the test says how."""

    def __init__(self) -> None:
        self.requests: list[RoundRequest] = []
        self._future: Future[RoundResult] = Future()

    @override
    def begin(self, request: RoundRequest) -> Future[RoundResult]:
        self.requests.append(request)
        self._future = Future()
        return self._future

    @override
    def close(self) -> None:
        self._future.cancel()

    def contribution(self, size: int) -> torch.Tensor:
        """Return what the latest request contributes now."""
        flat = torch.full((size,), float("nan"))
        self.requests[-1].fill(flat)
        return flat

    def average(self, average: torch.Tensor, *, num_tokens: int = 0) -> None:
        """End the round well."""
        result = RoundResult(RoundOutcome.AVERAGED, average=average, num_tokens=num_tokens)
        self._future.set_result(result)

    def fail(self) -> None:
        """End the round without an average."""
        self._future.set_result(RoundResult(RoundOutcome.FAILED, reason="the test said so"))


class UnreliableAverager(Averager):
    """Fails those of its rounds that the test names, without a word to the others."""

    def __init__(self, averager: Averager, failing: Container[int]) -> None:
        self._averager = averager
        self._failing = failing
        self._num_rounds = 0

    @override
    def begin(self, request: RoundRequest) -> Future[RoundResult]:
        number = self._num_rounds
        self._num_rounds += 1
        if number not in self._failing:
            return self._averager.begin(request)
        failed: Future[RoundResult] = Future()
        failed.set_result(RoundResult(RoundOutcome.FAILED, reason="the test said so"))
        return failed

    @override
    def close(self) -> None:
        self._averager.close()
