"""The view of the swarm: who counts, who is ahead, and whose settings differ."""

import pytest

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


@pytest.mark.parametrize(
    ("inner_steps", "median"),
    [([40], 40), ([10, 30], 10), ([10, 20, 10**9], 20), ([0, 0, 90, 100], 0)],
)
def test_the_swarms_inner_step_is_the_lower_median_of_its_peers(
    inner_steps: list[int], median: int
) -> None:
    at_5 = tuple(
        peer(f"p{number}", outer_step=5, inner_step=inner_step)
        for number, inner_step in enumerate(inner_steps)
    )
    elsewhere = peer("z", outer_step=4, inner_step=77)

    assert SwarmView((*at_5, elsewhere)).inner_step_at(OuterStep(5)) == median


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
