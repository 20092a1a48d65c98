"""The rhythm of rounds, whatever H, P and tau; and whom a peer waits for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.progress.records import PeerRecord, PeerState
from opendiloco.progress.view import SwarmView
from opendiloco.schedule import OuterSchedule, Readiness, RoundPolicy, Span, SwarmEvent
from opendiloco.units import OuterStep, Seconds

BEGIN, FINISH = SwarmEvent.BEGIN_ROUND, SwarmEvent.FINISH_ROUND


@st.composite
def schedules(draw: st.DrawFn) -> OuterSchedule:
    """Any valid H, P and tau; every tau from none to a whole round is likely."""
    steps_per_round = draw(st.integers(1, 12))
    num_fragments = draw(st.integers(1, 5))
    return OuterSchedule(
        inner_steps=steps_per_round * num_fragments,
        num_fragments=num_fragments,
        overlap_steps=draw(st.integers(0, steps_per_round)),
    )


outcomes = st.lists(st.booleans(), min_size=1, max_size=12)
"""For each round whether it is committed."""


@dataclass
class Loop:
    """The training loop, reduced to counting."""

    schedule: OuterSchedule
    time: int = 0  # inner steps since the start
    inner_step: int = 0
    outer_step: int = 0
    exported_at: int | None = None  # inner step of the round in flight
    begun: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def run(self, committed: Sequence[bool]) -> "Loop":
        while len(self.finished) < len(committed):
            in_flight = self.exported_at is not None
            span = self.schedule.next_span(self.inner_step, in_flight=in_flight)
            self.spans.append(span)
            self.time += span.num_steps
            self.inner_step += span.num_steps
            for event in span.events:
                if event is BEGIN:
                    assert self.exported_at is None, "two rounds in flight"
                    self.exported_at = self.inner_step
                    self.begun.append(self.time)
                else:
                    assert self.exported_at is not None, "nothing to finish"
                    if committed[len(self.finished)]:
                        self.inner_step -= self.exported_at
                        self.outer_step += 1
                    self.exported_at = None
                    self.finished.append(self.time)
        return self


@given(schedules(), outcomes)
def test_a_round_begins_every_h_over_p_steps_whether_rounds_fail_or_not(
    schedule: OuterSchedule, committed: list[bool]
) -> None:
    loop = Loop(schedule).run(committed)

    every = schedule.inner_steps // schedule.num_fragments
    assert loop.begun == [every * (number + 1) for number in range(len(loop.begun))]


@given(schedules(), outcomes)
def test_a_round_ends_tau_steps_after_it_began(
    schedule: OuterSchedule, committed: list[bool]
) -> None:
    loop = Loop(schedule).run(committed)

    expected = [began + schedule.overlap_steps for began in loop.begun]
    assert loop.finished == expected[: len(loop.finished)]


@given(schedules(), outcomes)
def test_every_span_has_inner_steps_and_ends_with_an_event(
    schedule: OuterSchedule, committed: list[bool]
) -> None:
    loop = Loop(schedule).run(committed)

    assert all(span.num_steps >= 1 and span.events for span in loop.spans)


@given(schedules(), st.integers(1, 12))
def test_the_swarms_step_is_the_number_of_inner_steps_while_no_round_fails(
    schedule: OuterSchedule, num_rounds: int
) -> None:
    loop = Loop(schedule).run([True] * num_rounds)

    assert schedule.swarm_step(OuterStep(loop.outer_step), loop.inner_step) == loop.time


@given(schedules())
def test_p_rounds_in_a_row_average_every_fragment_once(schedule: OuterSchedule) -> None:
    count = schedule.num_fragments

    fragments = [schedule.fragment(OuterStep(7 + k)) for k in range(count)]

    assert sorted(fragments) == list(range(count))


def test_outer_step_k_averages_fragment_k_mod_p() -> None:
    schedule = OuterSchedule(inner_steps=6, num_fragments=3)

    assert [schedule.fragment(OuterStep(k)) for k in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("overlap", "inner_step", "in_flight", "expected"),
    [
        (0, 0, False, Span(10, (BEGIN, FINISH))),
        (0, 4, False, Span(6, (BEGIN, FINISH))),
        (0, 10, False, Span(10, (BEGIN, FINISH))),
        (3, 0, False, Span(10, (BEGIN,))),
        (3, 10, True, Span(3, (FINISH,))),
        (3, 12, True, Span(1, (FINISH,))),
        (3, 3, False, Span(7, (BEGIN,))),
        (3, 13, False, Span(7, (BEGIN,))),
        (10, 10, True, Span(10, (FINISH, BEGIN))),
    ],
)
def test_the_next_span_with_ten_steps_a_round(
    overlap: int, inner_step: int, *, in_flight: bool, expected: Span
) -> None:
    schedule = OuterSchedule(inner_steps=10, overlap_steps=overlap)

    assert schedule.next_span(inner_step, in_flight=in_flight) == expected


@pytest.mark.parametrize(
    ("inner_steps", "num_fragments", "overlap_steps"),
    [(0, 1, 0), (-5, 1, 0), (10, 0, 0), (10, 3, 0), (10, 1, -1), (10, 1, 11), (10, 2, 6)],
)
def test_a_rhythm_that_does_not_fit_is_refused(
    inner_steps: int, num_fragments: int, overlap_steps: int
) -> None:
    with pytest.raises(ValueError, match=r"inner_steps|overlap_steps"):
        OuterSchedule(inner_steps, num_fragments, overlap_steps)


def at(state: PeerState, outer_step: int = 5) -> Callable[[str], PeerRecord]:
    return lambda peer_id: PeerRecord(peer_id=peer_id, state=state, outer_step=outer_step)


READY, TRAINING, JOINING = at("averaging"), at("training"), at("joining")
LATER, FINISHING, EARLIER = at("training", 6), at("averaging", 4), at("training", 4)
EARLY, LATE = 1.0, 10.0  # the policy below waits 10 s


@pytest.mark.parametrize(
    ("others", "waited", "expected"),
    [
        ([], EARLY, (Readiness.ALONE, 1)),
        ([READY], EARLY, (Readiness.SEARCH, 2)),
        ([READY, READY], EARLY, (Readiness.SEARCH, 3)),
        ([TRAINING], EARLY, (Readiness.WAIT, 2)),
        ([TRAINING], LATE, (Readiness.ALONE, 1)),
        ([TRAINING, READY], EARLY, (Readiness.WAIT, 3)),
        ([TRAINING, READY], LATE, (Readiness.SEARCH, 2)),
        ([EARLIER], EARLY, (Readiness.ALONE, 1)),
        ([EARLIER, READY], EARLY, (Readiness.SEARCH, 2)),
        ([FINISHING], EARLY, (Readiness.WAIT, 2)),
        ([FINISHING], LATE, (Readiness.ALONE, 1)),
        ([FINISHING, READY], EARLY, (Readiness.WAIT, 3)),
        ([FINISHING, READY], LATE, (Readiness.SEARCH, 2)),
        ([JOINING], EARLY, (Readiness.ALONE, 1)),
        ([LATER], EARLY, (Readiness.BEHIND, 1)),
        ([LATER, READY, TRAINING], EARLY, (Readiness.BEHIND, 1)),
    ],
)
def test_what_a_peer_at_outer_step_5_does(
    others: list[Callable[[str], PeerRecord]], waited: float, expected: tuple[Readiness, int]
) -> None:
    view = SwarmView(tuple(make(f"peer-{number}") for number, make in enumerate(others)))

    decision = RoundPolicy(wait=Seconds(10.0)).decide(
        view, outer_step=OuterStep(5), waited=Seconds(waited)
    )

    assert decision == expected


def of_lineage(digest: str, state: PeerState, outer_step: int = 5) -> PeerRecord:
    return PeerRecord(
        peer_id=f"{digest}-{state}", state=state, outer_step=outer_step, digest=digest
    )


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([of_lineage("ours", "averaging")], (Readiness.SEARCH, 2)),
        ([of_lineage("ours", "training")], (Readiness.WAIT, 2)),
        ([of_lineage("theirs", "averaging")], (Readiness.ALONE, 1)),
        ([of_lineage("theirs", "training")], (Readiness.ALONE, 1)),
        (
            [of_lineage("theirs", "training"), of_lineage("ours", "averaging")],
            (Readiness.SEARCH, 2),
        ),
        ([of_lineage("before", "averaging", 4)], (Readiness.WAIT, 2)),
        ([of_lineage("", "averaging")], (Readiness.SEARCH, 2)),
        ([of_lineage("theirs", "training", 6)], (Readiness.BEHIND, 1)),
    ],
)
def test_a_peer_waits_only_for_those_that_train_from_its_own_state(
    others: list[PeerRecord], expected: tuple[Readiness, int]
) -> None:
    decision = RoundPolicy(wait=Seconds(10.0)).decide(
        SwarmView(tuple(others)), outer_step=OuterStep(5), waited=Seconds(1.0), lineage="ours"
    )

    assert decision == expected


def test_at_outer_step_0_a_peer_waits_for_those_that_still_join() -> None:
    view = SwarmView((PeerRecord(peer_id="a", state="joining", outer_step=0),))

    decision = RoundPolicy(wait=Seconds(10.0)).decide(
        view, outer_step=OuterStep(0), waited=Seconds(1.0)
    )

    assert decision == (Readiness.WAIT, 2)
