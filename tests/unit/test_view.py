"""The view of the swarm: who counts, who is ahead, and whose settings differ."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendiloco.progress.records import PeerRecord
from opendiloco.progress.view import Sighting, SwarmView, foreign_terms, view_swarm
from opendiloco.units import OuterStep, Seconds

MAX_AGE = Seconds(10.0)
TERMS = {"seed": "1", "diloco.inner-steps": "500"}


def peer(peer_id: str, **changes: object) -> PeerRecord:
    record = PeerRecord(peer_id=peer_id, state="training", fingerprint="ours", terms=TERMS)
    return PeerRecord.model_validate(record.model_dump() | changes)


def seen(*peers: PeerRecord, age: float = 1.0) -> list[Sighting]:
    return [Sighting(record, Seconds(age)) for record in peers]


def view_of(sightings: list[Sighting]) -> list[str]:
    view = view_swarm(sightings, own_peer_id="me", fingerprint="ours", max_age=MAX_AGE)
    return [record.peer_id for record in view.peers]


def ids(records: tuple[PeerRecord, ...]) -> list[str]:
    return [record.peer_id for record in records]


def test_live_peers_are_in_the_view_in_the_same_order_for_everybody() -> None:
    sightings = seen(peer("c"), peer("a"), peer("b"))

    assert view_of(sightings) == view_of(sightings[::-1]) == ["a", "b", "c"]


def test_a_record_as_old_as_allowed_still_counts_and_an_older_one_does_not() -> None:
    sightings = seen(peer("a"), age=10.0) + seen(peer("b"), age=10.001)

    assert view_of(sightings) == ["a"]


def test_the_own_record_is_left_out() -> None:
    assert view_of(seen(peer("me"), peer("a"))) == ["a"]


def test_peers_with_another_fingerprint_are_left_out() -> None:
    assert view_of(seen(peer("a"), peer("b", fingerprint="theirs"))) == ["a"]


def test_peers_that_leave_are_left_out() -> None:
    assert view_of(seen(peer("a"), peer("b", state="leaving"))) == ["a"]


def test_nobody_there_is_an_empty_view() -> None:
    view = view_swarm([], own_peer_id="me", fingerprint="ours", max_age=MAX_AGE)

    assert view == SwarmView()
    assert view.ahead_of(OuterStep(0)) == ()
    assert view.inner_step_at(OuterStep(0)) == 0


def test_training_and_ready_are_told_apart_at_the_same_outer_step_only() -> None:
    view = SwarmView(
        (
            peer("a", outer_step=3),
            peer("b", outer_step=3, state="averaging"),
            peer("c", outer_step=3, state="joining"),
            peer("d", outer_step=2),
            peer("e", outer_step=4, state="averaging"),
        )
    )

    assert ids(view.coming_to(OuterStep(3))) == ["a"]
    assert ids(view.ready_at(OuterStep(3))) == ["b"]


def test_those_still_in_the_round_before_are_coming_too() -> None:
    view = SwarmView(
        (
            peer("a", outer_step=2, state="averaging"),
            peer("b", outer_step=1, state="averaging"),
            peer("c", outer_step=2),
        )
    )

    assert ids(view.coming_to(OuterStep(3))) == ["a"]


def test_those_that_join_count_as_coming_to_outer_step_0() -> None:
    view = SwarmView((peer("a", state="joining"), peer("b")))

    assert set(ids(view.coming_to(OuterStep(0)))) == {"a", "b"}


def test_members_are_those_that_hold_a_state() -> None:
    view = SwarmView((peer("a", state="joining"), peer("b"), peer("c", state="averaging")))

    assert ids(view.members()) == ["b", "c"]


def test_what_two_peers_agree_on_comes_before_a_lone_claim_of_outer_step_a_billion() -> None:
    view = SwarmView(
        (peer("a", outer_step=10**9), peer("b", outer_step=7), peer("c", outer_step=7))
    )

    assert ids(view.ahead_of(OuterStep(5))) == ["b", "c", "a"]


def test_of_equally_large_crowds_the_later_outer_step_comes_first() -> None:
    view = SwarmView((peer("a", outer_step=6), peer("b", outer_step=8), peer("c", outer_step=7)))

    assert ids(view.ahead_of(OuterStep(5))) == ["b", "c", "a"]


def test_peers_at_the_same_outer_step_or_behind_are_not_ahead() -> None:
    view = SwarmView((peer("a", outer_step=5), peer("b", outer_step=4)))

    assert view.ahead_of(OuterStep(5)) == ()


def test_a_peer_that_joins_has_no_state_to_be_ahead_with() -> None:
    view = SwarmView((peer("a", outer_step=9, state="joining"),))

    assert view.ahead_of(OuterStep(5)) == ()


def test_of_peers_ahead_those_with_the_commonest_state_come_first() -> None:
    view = SwarmView(
        (
            peer("a", outer_step=7, digest="x"),
            peer("b", outer_step=6, digest="y"),
            peer("c", outer_step=7, digest="z"),
            peer("d", outer_step=6, digest="y"),
        )
    )

    assert ids(view.ahead_of(OuterStep(5))) == ["b", "d", "a", "c"]


def at_5(lineages: str, **changes: object) -> tuple[PeerRecord, ...]:
    """One peer at outer step 5 for each letter, which is its digest."""
    return tuple(
        peer(f"p{number}", **{"outer_step": 5, "digest": digest, **changes})
        for number, digest in enumerate(lineages)
    )


@pytest.mark.parametrize(
    ("mine", "others", "winner"),
    [
        ("b", "", None),  # alone
        ("b", "bb", None),  # all agree
        ("b", "aa", "a"),  # one against two
        ("a", "bb", "b"),  # the smaller digest does not help against more peers
        ("b", "abb", None),
        ("b", "aab", "a"),  # two against two: the smaller digest
        ("a", "abb", None),
        ("a", "b", None),
        ("b", "a", "a"),
        ("c", "aabbb", "b"),  # three lineages
        ("c", "aabbcc", None),  # mine has three with this peer
        ("c", "aabb", "a"),
        ("b", ["", "", ""], None),  # who announces no digest is no argument
    ],
)
def test_at_one_outer_step_most_peers_prevail_and_then_the_smaller_digest(
    mine: str, others: str, winner: str | None
) -> None:
    view = SwarmView(at_5(others))

    prevailing = view.prevail_over(OuterStep(5), mine)

    assert ids(prevailing) == [p.peer_id for p in view.peers if p.digest == winner]


@pytest.mark.parametrize(
    "changes", [{"outer_step": 4}, {"outer_step": 6}, {"state": "joining"}, {"digest": ""}]
)
def test_only_peers_that_hold_a_state_of_the_same_outer_step_prevail(
    changes: dict[str, object],
) -> None:
    view = SwarmView(at_5("aaa", **changes))

    assert view.prevail_over(OuterStep(5), "b") == ()


def test_those_that_train_and_those_that_average_prevail_together() -> None:
    view = SwarmView((*at_5("a"), peer("z", outer_step=5, digest="a", state="averaging")))

    assert ids(view.prevail_over(OuterStep(5), "b")) == ["p0", "z"]


@pytest.mark.parametrize(("num_undecided", "prevails"), [(0, True), (1, True), (2, False)])
def test_nobody_prevails_while_peers_still_in_the_round_before_could_turn_the_balance(
    num_undecided: int, *, prevails: bool
) -> None:
    undecided = tuple(
        peer(f"u{number}", outer_step=4, state="averaging") for number in range(num_undecided)
    )
    view = SwarmView(at_5("aaa") + undecided)  # three against this one

    assert bool(view.prevail_over(OuterStep(5), "b")) is prevails


State = tuple[int, str]
STATES = st.tuples(st.integers(5, 8), st.sampled_from("abcd"))


def where_to(states: list[State], own: int, seen: list[State]) -> State:
    """The state a peer goes to by the rule, when it sees the others as they were."""
    others = [
        peer(f"p{number}", outer_step=state[0], digest=state[1])
        for number, state in enumerate(seen)
        if number != own
    ]
    view = SwarmView(tuple(others))
    outer_step, digest = OuterStep(states[own][0]), states[own][1]
    better = view.ahead_of(outer_step) or view.prevail_over(outer_step, digest)
    return (better[0].outer_step, better[0].digest) if better else states[own]


@settings(max_examples=40)
@given(start=st.lists(STATES, min_size=1, max_size=9), order=st.randoms(use_true_random=False))
def test_peers_that_look_one_after_another_end_in_one_state(
    start: list[State], order: random.Random
) -> None:
    states = list(start)
    left: list[set[State]] = [set() for _ in states]

    for _ in range(10):
        for own in order.sample(range(len(states)), len(states)):
            target = where_to(states, own, states)
            if target != states[own]:
                left[own].add(states[own])
            states[own] = target
            assert target not in left[own], "a peer went back to a state that it had left"

    assert len(set(states)) == 1
    assert states[0][0] == max(outer_step for outer_step, _ in start)


@settings(max_examples=40)
@given(start=st.lists(STATES, min_size=1, max_size=9), order=st.randoms(use_true_random=False))
def test_peers_that_see_each_other_as_they_were_a_look_before_end_in_one_state(
    start: list[State], order: random.Random
) -> None:
    states, seen = list(start), list(start)

    for _ in range(10):
        now = [
            where_to(states, own, [order.choice(both) for both in zip(states, seen, strict=True)])
            for own in range(len(states))
        ]
        states, seen = now, states
    for _ in range(10):  # in the end records are up to date
        states = [where_to(states, own, states) for own in range(len(states))]

    assert len(set(states)) == 1


def test_after_a_cut_into_two_halves_one_of_the_two_states_wins_on_all_four() -> None:
    states = [(7, "b"), (7, "b"), (7, "a"), (7, "a")]

    after = [where_to(states, own, states) for own in range(4)]

    assert after == [(7, "a")] * 4


def test_a_lineage_that_is_further_wins_over_a_larger_one() -> None:
    states = [(7, "x"), (6, "y"), (6, "y"), (6, "y")]

    after = [where_to(states, own, states) for own in range(4)]

    assert after == [(7, "x")] * 4


@pytest.mark.parametrize(
    ("inner_steps", "median"),
    [([40], 40), ([10, 30], 10), ([10, 20, 10**9], 20), ([0, 0, 90, 100], 0)],
)
def test_the_swarms_inner_step_is_the_lower_median_of_its_peers(
    inner_steps: list[int], median: int
) -> None:
    here = tuple(
        peer(f"p{number}", outer_step=5, inner_step=inner_step)
        for number, inner_step in enumerate(inner_steps)
    )
    elsewhere = peer("z", outer_step=4, inner_step=77)

    assert SwarmView((*here, elsewhere)).inner_step_at(OuterStep(5)) == median


def foreign(sightings: list[Sighting]) -> dict[str, tuple[str, str]]:
    return foreign_terms(sightings, own_peer_id="me", terms=TERMS, max_age=MAX_AGE)


def test_a_swarm_with_other_settings_is_named_field_by_field() -> None:
    theirs = {"seed": "1", "diloco.inner-steps": "100", "averaging.codec": "fp16"}

    assert foreign(seen(peer("a", terms=theirs))) == {
        "diloco.inner-steps": ("500", "100"),
        "averaging.codec": ("(unset)", "fp16"),
    }


def test_a_setting_that_the_swarm_does_not_have_is_named() -> None:
    assert foreign(seen(peer("a", terms={"seed": "1"}))) == {
        "diloco.inner-steps": ("500", "(unset)")
    }


def test_one_live_peer_with_the_same_settings_is_enough() -> None:
    assert foreign(seen(peer("a", terms={"seed": "2"}), peer("b"))) == {}


@pytest.mark.parametrize(
    "sightings",
    [
        [],
        seen(peer("me", terms={"seed": "2"})),
        seen(peer("a", terms={"seed": "2"}, state="leaving")),
        seen(peer("a", terms={"seed": "2"}), age=10.001),
    ],
    ids=["nobody", "only this peer", "only one that leaves", "only one that is gone"],
)
def test_without_live_peers_nothing_differs(sightings: list[Sighting]) -> None:
    assert foreign(sightings) == {}


def test_the_settings_of_most_peers_are_named_not_those_of_a_lone_one() -> None:
    rogue = peer("a", terms={"seed": "666"}, fingerprint="rogue")
    others = [peer(name, terms={"seed": "2"}, fingerprint="theirs") for name in ("b", "c")]

    assert foreign(seen(rogue, *others))["seed"] == ("1", "2")
