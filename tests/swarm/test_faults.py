"""Whatever dies or freezes, in whichever phase of a round: the survivors hold one state, soon.

Four peers hold rounds with 40 MB of float32 each, in fp16 on the wire. They live on from test
to test; only the victims are replaced.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import psutil
import pytest

from tests.support.faults import Fault, Thaw, When, Who
from tests.support.peers import seconds_until_gone
from tests.support.round_checks import (
    assert_average_is_of,
    assert_committed,
    assert_one_state,
)
from tests.support.round_handle import LONGEST_ROUND
from tests.support.round_swarm import QUICK, Round, RoundSwarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

SIZE = 10_000_000
COUNT = 4
STALL = float(str(QUICK["averaging"]["stall_timeout_s"]))
SPARE = 5.0

# The faults of whole peers are part of every test run; those of single processes take longer.
EVERY_PHASE = [
    pytest.param(when, who, marks=() if who is Who.PEER else pytest.mark.faults)
    for when, who in product(When, Who)
]


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> None:
    """In place of the check after every test: the peers live on, and are checked at their end."""


@contextmanager
def ended_without_a_trace(swarm: RoundSwarm) -> Iterator[RoundSwarm]:
    """End the swarm and all its processes, however it stands then."""
    before = set(psutil.Process().children(recursive=True))
    try:
        yield swarm
    finally:
        started = set(psutil.Process().children(recursive=True)) - before
        swarm.close()
        seconds_until_gone(list(started), within=10.0)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundSwarm]:
    made = RoundSwarm(tmp_path_factory.mktemp("faults"), size=SIZE)
    with ended_without_a_trace(made):
        yield made


@pytest.fixture(scope="module")
def longest(started: RoundSwarm) -> float:
    """Seconds that a round may take in which somebody dies."""
    started.settle()
    started.hold_round()  # the first one also opens the connections
    calm = [started.hold_round() for _ in range(2)]
    slowest = max(event["seconds"] for held in calm for event in held.ended.values())
    return float(slowest) + STALL + SPARE


@pytest.fixture
def swarm(started: RoundSwarm) -> RoundSwarm:
    """Four peers in one state."""
    started.settle()
    return started


def victim_of(when: When, who: Who) -> int:
    """Return a member: every one is hit in some phase, by some fault."""
    return (list(When).index(when) + list(Who).index(who)) % COUNT


def others(victim: int) -> list[int]:
    return [member for member in range(COUNT) if member != victim]


def slowest_of(held: Round, members: list[int]) -> float:
    return max(float(held.ended[member]["seconds"]) for member in members)


def test_without_a_fault_four_peers_average_all_their_work(swarm: RoundSwarm) -> None:
    held = swarm.hold_round()

    assert_one_state(held, range(COUNT))
    assert_committed(held, range(COUNT))
    assert_average_is_of(held, size=SIZE, survivors=range(COUNT))


@pytest.mark.parametrize(("when", "who"), EVERY_PHASE, ids=lambda value: value.value)
def test_survivors_of_a_kill_hold_one_average(
    swarm: RoundSwarm, longest: float, when: When, who: Who
) -> None:
    victim = victim_of(when, who)
    survivors = others(victim)
    kill = Fault(signal.SIGKILL, who, when)

    held = swarm.hold_round(strike=kill, victim=victim, ends_for=survivors)
    last = None
    if who is not Who.PEER:
        last = swarm.peers[victim].wait_for("ended", "lost", within=LONGEST_ROUND)
    swarm.condemn(victim)
    after = swarm.hold_round(survivors)

    assert kill.fired
    assert_one_state(held, survivors)
    assert_committed(held, survivors)
    assert_average_is_of(held, size=SIZE, survivors=survivors, victim=victim)
    assert slowest_of(held, survivors) < longest
    assert_one_state(after, survivors)
    assert_committed(after, survivors)
    assert_average_is_of(after, size=SIZE, survivors=survivors)
    assert last is None or last["event"] == "lost" or swarm.knows(last)


@pytest.mark.parametrize(
    "who", [Who.PEER, pytest.param(Who.AVERAGER, marks=pytest.mark.faults)], ids=lambda w: w.value
)
@pytest.mark.parametrize("when", When, ids=lambda value: value.value)
def test_a_frozen_peer_that_wakes_after_the_decision_changes_nothing(
    swarm: RoundSwarm, longest: float, when: When, who: Who
) -> None:
    victim = victim_of(when, who)
    survivors = others(victim)
    freeze = Fault(signal.SIGSTOP, who, when)

    held = swarm.hold_round(strike=freeze, victim=victim, ends_for=survivors)
    freeze.thaw(swarm.peers[victim])
    woken = swarm.peers[victim].wait_for("ended", "lost", within=LONGEST_ROUND)
    is_lost = woken["event"] == "lost"
    if is_lost:
        swarm.condemn(victim)
    members = survivors if is_lost else list(range(COUNT))
    after = swarm.hold_round(members)

    assert freeze.fired
    assert_one_state(held, survivors)
    assert_committed(held, survivors)
    assert_average_is_of(held, size=SIZE, survivors=survivors, victim=victim)
    assert slowest_of(held, survivors) < longest
    if is_lost:  # an averager that did not answer is given up, but nobody gives itself up
        assert who is Who.AVERAGER
    else:
        assert swarm.knows(woken)
    assert_one_state(after, members)
    assert_committed(after, members)
    assert_average_is_of(after, size=SIZE, survivors=members, victim=None if is_lost else victim)


@pytest.mark.parametrize("when", [When.FIRST_PART, When.EXCHANGE], ids=lambda value: value.value)
def test_a_peer_that_wakes_in_the_middle_of_the_next_exchange_does_not_disturb_it(
    swarm: RoundSwarm, longest: float, when: When
) -> None:
    victim = victim_of(when, Who.PEER)
    survivors = others(victim)
    freeze = Fault(signal.SIGSTOP, Who.PEER, when)

    swarm.hold_round(strike=freeze, victim=victim, ends_for=survivors)
    thaw = Thaw(freeze, swarm.peers[victim], When.FIRST_PART)
    after = swarm.hold_round(survivors, strike=thaw, victim=survivors[0])
    woken = swarm.peers[victim].wait_for("ended", within=LONGEST_ROUND)

    assert freeze.fired
    assert thaw.fired
    assert_one_state(after, survivors)
    assert_committed(after, survivors)
    assert_average_is_of(after, size=SIZE, survivors=survivors)
    assert slowest_of(after, survivors) < longest
    assert swarm.knows(woken)


@pytest.mark.faults
@pytest.mark.parametrize("when", When, ids=lambda value: value.value)
def test_a_pause_shorter_than_the_stall_timeout_costs_nobody_its_work(
    swarm: RoundSwarm, longest: float, when: When
) -> None:
    pause = Fault(signal.SIGSTOP, Who.PEER, when, pause=STALL / 4)

    held = swarm.hold_round(strike=pause, victim=victim_of(when, Who.PEER))

    assert pause.fired
    assert_one_state(held, range(COUNT))
    assert_committed(held, range(COUNT))
    assert_average_is_of(held, size=SIZE, survivors=range(COUNT))
    assert slowest_of(held, list(range(COUNT))) < longest
