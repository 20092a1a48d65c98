"""Following peers by their event logs: whole lines only, and what they mean."""

import json
from pathlib import Path

import pytest

from opendiloco.events import Event
from peers.demo.follow import EventTail, PeerStory, committed, happening


def inner(inner_step: int, loss: float | None = 2.5) -> Event:
    return {
        "t": 1.0,
        "event": "inner",
        "inner_step": inner_step,
        "loss": loss,
        "num_tokens": 100,
        "tokens_per_second": 50.0,
    }


def outer_step(outer_step: int, verdict: str = "committed") -> Event:
    return {
        "t": 2.0,
        "event": "outer_step",
        "outer_step": outer_step,
        "verdict": verdict,
        "num_tokens": 1500,
        "loss": 3.25,
    }


def round_of(num_peers: int) -> Event:
    return {"t": 1.5, "event": "round", "outcome": "averaged", "num_peers": num_peers}


def story_of(*events: Event) -> PeerStory:
    story = PeerStory("peer-1")
    for event in events:
        story.take(event, steps_per_round=10)
    return story


def test_there_are_no_events_before_there_is_a_file(tmp_path: Path) -> None:
    tail = EventTail(tmp_path / "events.jsonl")

    events = tail.read()

    assert events == []


def test_a_half_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = json.dumps({"event": "joined"}) + "\n"
    tail = EventTail(path)

    path.write_text(line + line[:7])
    first = tail.read()
    path.write_text(line + line)
    second = tail.read()

    assert (first, second) == ([{"event": "joined"}], [{"event": "joined"}])


def test_a_line_is_read_only_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "joined"}\n')
    tail = EventTail(path)
    tail.read()

    again = tail.read()

    assert again == []


def test_a_line_that_a_full_disk_has_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "inn\n{"event": "left"}\n7\n')

    events = EventTail(path).read()

    assert events == [{"event": "left"}]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "starting"),
        ([{"event": "started"}], "joining"),
        ([{"event": "joined", "outer_step": 3}], "training"),
        ([inner(9)], "training"),
        ([inner(10)], "averaging"),
        ([inner(10), outer_step(1)], "training"),
        ([inner(10), {"event": "left", "outer_step": 1}], "left"),
    ],
)
def test_a_peers_state_follows_from_its_last_event(events: list[Event], state: str) -> None:
    story = story_of(*events)

    assert story.state == state


def test_tokens_add_up_over_inner_events() -> None:
    story = story_of(inner(1), inner(2), inner(3))

    assert story.num_tokens == 300


def test_a_loss_that_is_not_finite_is_no_point_of_the_curve() -> None:
    story = story_of(inner(1, 5.0), inner(2, None))

    assert [point.loss for point in story.curve] == [5.0]


def test_only_committed_outer_steps_count_as_rounds() -> None:
    story = story_of(outer_step(1), outer_step(1, "carried"), outer_step(2, "rebased"))

    assert story.num_rounds == 1


def test_a_round_alone_is_not_shared() -> None:
    story = story_of(round_of(3), outer_step(1), round_of(1), outer_step(2))

    assert (story.num_rounds, story.num_shared) == (2, 1)


def test_a_committed_outer_step_is_told_with_its_peers_loss_and_tokens() -> None:
    story = story_of(round_of(3), outer_step(4))

    text = committed(story, outer_step(4))

    assert text == "outer step 4: 3 peers averaged, loss 3.250, 1.5k tokens"


def test_joining_with_the_swarms_state_is_told_with_its_size() -> None:
    event: Event = {"event": "joined", "from": "swarm", "outer_step": 6, "bytes": 3 * 2**20}

    text = happening(PeerStory("peer-4"), event)

    assert text == "peer-4 joined at outer step 6 with the state of the swarm, 3.0 MiB"


def test_a_failed_round_is_told_with_its_reason() -> None:
    event: Event = {
        "event": "round",
        "outcome": "failed",
        "outer_step": 2,
        "attempts": 3,
        "reason": "out of time",
    }

    text = happening(PeerStory("peer-1"), event)

    assert text == "peer-1: round 2 failed after 3 attempts: out of time"


@pytest.mark.parametrize("event", [inner(3), outer_step(2), round_of(2)])
def test_what_all_peers_do_all_the_time_is_not_told(event: Event) -> None:
    text = happening(PeerStory("peer-1"), event)

    assert text == ""
