"""What is special about averaging inside one process: patience, and what is kept."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager

import pytest
import torch

from opendiloco.averaging.local import LocalAverager, LocalSwarm
from opendiloco.averaging.protocol import RoundOutcome, RoundRequest, RoundResult
from opendiloco.units import OuterStep, Seconds

LONG, SHORT = 60.0, 0.05
"""Patience in seconds: never used up in these tests, or soon."""


@contextmanager
def members(count: int, *, patience: float) -> Iterator[list[LocalAverager]]:
    swarm = LocalSwarm([3], patience=Seconds(patience))
    averagers = [swarm.join() for _ in range(count)]
    try:
        yield averagers
    finally:
        for averager in averagers:
            averager.close()


def begin(
    averager: LocalAverager, value: float, *, outer_step: int = 0, timeout: float = LONG
) -> Future[RoundResult]:
    def fill(out: torch.Tensor) -> None:
        out.fill_(value)

    return averager.begin(
        RoundRequest(
            outer_step=OuterStep(outer_step),
            fragment=0,
            fill=fill,
            weight=1.0,
            num_tokens=1,
            timeout=Seconds(timeout),
        )
    )


def averages(futures: Sequence[Future[RoundResult]]) -> list[list[float]]:
    found = [future.result(10).average for future in futures]
    return [average.tolist() for average in found if average is not None]


def test_a_round_waits_for_every_member() -> None:
    with members(3, patience=LONG) as (first, second, third):
        futures = [begin(first, 0.0), begin(second, 3.0)]
        waiting = [future.done() for future in futures]
        futures.append(begin(third, 6.0))

        assert averages(futures) == [[3.0] * 3] * 3
        assert waiting == [False, False]


def test_patience_ends_the_round_with_those_that_have_come() -> None:
    with members(3, patience=LONG) as (first, second, _):
        futures = [begin(first, 0.0), begin(second, 4.0, timeout=0.5)]

        assert averages(futures) == [[2.0] * 3] * 2


def test_a_member_that_comes_too_late_has_missed_the_round() -> None:
    with members(2, patience=SHORT) as (punctual, late):
        alone = begin(punctual, 1.0).result(10)

        missed = begin(late, 5.0).result(10)

    assert alone.outcome is RoundOutcome.ALONE
    assert (missed.outcome, missed.average) == (RoundOutcome.FAILED, None)
    assert missed.reason == "the others have averaged without us"


def test_a_requests_timeout_is_shorter_than_patience() -> None:
    with members(2, patience=LONG) as (hasty, _):
        result = begin(hasty, 1.0, timeout=SHORT).result(10)

    assert result.outcome is RoundOutcome.ALONE


def test_a_member_that_leaves_is_not_waited_for() -> None:
    with members(2, patience=LONG) as (stays, leaves):
        future = begin(stays, 1.0)
        leaves.close()

        result = future.result(10)

    assert result.outcome is RoundOutcome.ALONE


def test_a_member_that_joins_later_takes_part_from_then_on() -> None:
    swarm = LocalSwarm([3], patience=Seconds(LONG))
    with closing(swarm.join()) as first:
        begin(first, 1.0).result(10)

        with closing(swarm.join()) as second:
            futures = [begin(first, 1.0, outer_step=1), begin(second, 2.0, outer_step=1)]

            assert averages(futures) == [[1.5] * 3] * 2


def test_members_do_not_share_the_memory_of_their_averages() -> None:
    with members(2, patience=LONG) as pair:
        ended = [future.result(10) for future in [begin(member, 1.0) for member in pair]]

        mine, theirs = (result.average for result in ended)
        assert mine is not None
        assert theirs is not None
        mine.zero_()
        assert theirs.tolist() == [1.0] * 3


def test_contributions_are_freed_when_the_round_is_over() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def fill(out: torch.Tensor) -> None:
        kept.append(weakref.ref(out))
        out.fill_(1.0)

    request = RoundRequest(OuterStep(0), 0, fill, 1.0, 1, Seconds(LONG))
    with members(2, patience=LONG) as pair:
        for future in [member.begin(request) for member in pair]:
            future.result(10)
        gc.collect()

        assert [reference() for reference in kept] == [None, None]


def test_a_closed_member_cannot_begin() -> None:
    with members(1, patience=LONG) as (member,):
        member.close()

        with pytest.raises(RuntimeError):
            begin(member, 1.0)
