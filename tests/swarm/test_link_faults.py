"""Slow lines and partitions in the middle of a round: nobody ends up with a state of its own.

Four peers on an emulated WAN, each on a host of its own.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.faults import When
from tests.support.link_faults import Partition, SlowLine
from tests.support.round_checks import (
    assert_average_is_of,
    assert_carried,
    assert_committed,
    assert_one_state,
    how_it_ended,
)
from tests.support.round_swarm import QUICK, Round, RoundSwarm
from tests.support.wan.emulation import Wan, WanHost

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.getuid() != 0 or not shutil.which("ip") or not shutil.which("cc"),
        reason="an emulated WAN needs root, iproute2 and a C compiler",
    ),
]

SIZE = 10_000_000
COUNT = 4
MBIT = 400.0
DELAY_MS = 5.0
STALL = float(str(QUICK["averaging"]["stall_timeout_s"]))
SPARE = 5.0
HALVES = ([0, 1], [2, 3])
MEET_AGAIN = 90.0  # seconds: connections that hang are given up after 40
# In a partition nobody is declared dead: what is to be seen is what the round itself does.
# Each half goes on trying, since the other one may be late, for as long as a round may take.
CONFIG = {
    "network": {**QUICK["network"], "peer_timeout_s": 60.0},
    "averaging": {**QUICK["averaging"], "exchange_timeout_s": 15.0, "attempts": 2},
}


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> None:
    """In place of the check after every test: the peers live on until the module's end."""


@pytest.fixture(scope="module")
def wan() -> Iterator[Wan]:
    with Wan([WanHost(up=MBIT, down=MBIT, delay_ms=DELAY_MS)] * COUNT) as made:
        yield made


@pytest.fixture(scope="module")
def started(wan: Wan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundSwarm]:
    with ExitStack() as stack:
        made = RoundSwarm(
            tmp_path_factory.mktemp("links"),
            size=SIZE,
            config=CONFIG,
            launchers={member: wan.launcher(member) for member in range(COUNT)},
            hosts=dict(enumerate(wan.addresses)),
        )
        stack.callback(made.close)
        yield made


@pytest.fixture(scope="module")
def calm(started: RoundSwarm) -> float:
    """Seconds of a round in which nothing happens."""
    started.settle()
    started.hold_round()  # the first one also opens the connections
    held = started.hold_round()
    return max(float(event["seconds"]) for event in held.ended.values())


@pytest.fixture
def swarm(started: RoundSwarm) -> RoundSwarm:
    """Four peers in one state."""
    started.settle()
    return started


def states_of(held: Round) -> set[tuple[int, str]]:
    return {(event["outer_step"], event["digest"]) for event in held.ended.values()}


@pytest.mark.parametrize(
    "when", [When.MATCHMAKING, When.FIRST_PART, When.EXCHANGE], ids=lambda value: value.value
)
def test_a_line_at_a_tenth_of_its_rate_makes_the_round_slow_and_nothing_else(
    swarm: RoundSwarm, wan: Wan, calm: float, when: When
) -> None:
    victim = 1 + list(When).index(when)
    slow = SlowLine(wan, MBIT / 10, when)

    try:
        held = swarm.hold_round(strike=slow, victim=victim)
    finally:
        slow.undo(victim, mbit=MBIT)

    assert slow.fired
    assert_one_state(held, range(COUNT))
    assert_committed(held, range(COUNT))
    # So many packets are lost at once that its line may be silent for as long as one that is cut.
    assert_average_is_of(held, size=SIZE, survivors=range(COUNT), victim=victim)
    slowest = max(float(event["seconds"]) for event in held.ended.values())
    assert slowest < calm + STALL + SPARE


@pytest.mark.parametrize(
    "when", [When.MATCHMAKING, When.FIRST_PART, When.EXCHANGE], ids=lambda value: value.value
)
def test_a_swarm_cut_in_two_in_the_middle_of_a_round_keeps_one_state_and_meets_again(
    swarm: RoundSwarm, wan: Wan, when: When
) -> None:
    cut = Partition(wan, HALVES, when)

    try:
        held = swarm.hold_round(strike=cut, victim=0)
    finally:
        cut.undo()
    healed_at = time.monotonic()
    later = [swarm.hold_round()]
    while time.monotonic() < healed_at + MEET_AGAIN and not have_met(later[-1]):
        later.append(swarm.hold_round())

    assert cut.fired
    # Votes that were heard before the cut can suffice; then one half knows, and the other not yet.
    assert len(states_of(held) - {(held.before["outer_step"], held.before["digest"])}) <= 1
    if when is When.MATCHMAKING:
        assert_carried(held, range(COUNT))
    assert have_met(later[-1]), [how_it_ended(again) for again in later[-4:]]
    assert_one_state(later[-1], range(COUNT))


def have_met(held: Round) -> bool:
    return all(event["num_peers"] == COUNT for event in held.ended.values())
