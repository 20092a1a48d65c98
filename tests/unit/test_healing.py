"""When a peer takes over another state, whom it asks, and what it says about it."""

from types import SimpleNamespace

import pytest
import torch

from opendiloco.errors import StateUnavailableError
from opendiloco.events import Event, EventLog
from opendiloco.progress.records import PeerRecord
from opendiloco.progress.view import SwarmView
from opendiloco.state import FragmentState, OuterState
from opendiloco.transfer import Download
from opendiloco.units import OuterStep, Seconds
from peers import healing as healing_module
from peers.healing import Healer

NO_TIME = Seconds(0.0)


def state_at(outer_step: int, value: float) -> OuterState:
    vector = torch.full((5,), value)
    return OuterState(OuterStep(outer_step), 100, (FragmentState(vector, vector),))


OWN, OTHER, LATER = state_at(5, 1.0), state_at(5, 2.0), state_at(6, 3.0)


def peers(*states: OuterState) -> SwarmView:
    return SwarmView(
        tuple(
            PeerRecord(
                peer_id=f"p{number}",
                state="training",
                outer_step=state.outer_step,
                digest=state.lineage,
            )
            for number, state in enumerate(states)
        )
    )


class Tracker:
    """Shows one view after another: the next one with every refresh, then the last."""

    def __init__(self, *views: SwarmView) -> None:
        self.views = list(views)
        self.distrusted: list[str] = []
        self.num_refreshed = 0

    def view(self) -> SwarmView:
        return self.views[0]

    def refresh(self, _timeout: Seconds) -> None:
        self.num_refreshed += 1
        if len(self.views) > 1:
            del self.views[0]

    def distrust(self, peer_id: str) -> None:
        self.distrusted.append(peer_id)


class Exchange:
    """Gives one state, or none."""

    def __init__(self, given: OuterState | None) -> None:
        self.given = given
        self.asked: list[tuple[list[str], int]] = []

    def fetch(
        self,
        donors: tuple[PeerRecord, ...],
        *,
        at_least: OuterStep,
        timeout: Seconds,
        base: OuterState,
    ) -> Download:
        assert (timeout, base) == (30.0, OWN)
        self.asked.append(([donor.peer_id for donor in donors], at_least))
        if self.given is None:
            raise StateUnavailableError("no donor gave a usable state")
        return Download(self.given, donors[0].peer_id, num_bytes=20, num_slices=1, duration=NO_TIME)


class Case:
    """A peer with a state of its own, and what it sees."""

    def __init__(
        self,
        *views: SwarmView,
        gives: OuterState | None = OTHER,
        is_leaving: bool = False,
        heartbeat: Seconds = NO_TIME,
    ) -> None:
        self.tracker, self.exchange = Tracker(*views), Exchange(gives)
        self.connection = SimpleNamespace(
            tracker=self.tracker, exchange=self.exchange, is_leaving=is_leaving
        )
        self.events: list[Event] = []
        self.healer = Healer(
            self.connection,  # type: ignore[arg-type]
            log=EventLog(None, listener=self.events.append),
            heartbeat=heartbeat,
            timeout=Seconds(30.0),
        )

    def names(self) -> list[object]:
        return [event["event"] for event in self.events]

    def find(self) -> OuterState | None:
        download = self.healer.fetch_better(OWN)
        return download.state if download else None


@pytest.mark.parametrize(
    "view", [SwarmView(), peers(OWN), peers(OWN, OWN, OTHER), peers(state_at(4, 9.0))]
)
def test_who_has_the_right_state_asks_nobody_and_waits_for_nothing(view: SwarmView) -> None:
    case = Case(view, heartbeat=Seconds(60.0))

    assert case.find() is None
    assert (case.exchange.asked, case.tracker.num_refreshed, case.events) == ([], 0, [])


def test_a_peer_that_differs_from_most_takes_their_state_and_says_so() -> None:
    case = Case(peers(OTHER, OWN, OTHER, OTHER))

    assert case.find() is OTHER
    assert case.exchange.asked == [(["p0", "p2", "p3"], 5)]
    assert case.names() == ["waiting", "healed"]
    told = {name: case.events[1][name] for name in case.events[1] if name not in {"t", "event"}}
    assert told == {
        "outer_step": 5,
        "slices": 1,
        "bytes": 20,
        "digest": OTHER.digest,
        "digest_before": OWN.digest,
    }


def test_a_difference_that_is_gone_a_heartbeat_later_heals_nothing() -> None:
    case = Case(peers(OTHER, OTHER), peers(OWN, OTHER))

    assert case.find() is None
    assert case.exchange.asked == []


def test_a_heartbeat_passes_between_the_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        assert case.tracker.num_refreshed == 0, "looked again too early"
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(
        healing_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    )
    case = Case(peers(OTHER, OTHER), heartbeat=Seconds(2.0))

    assert case.find() is OTHER
    assert sum(slept) >= 2.0


def test_winners_that_change_between_the_looks_are_not_followed_yet() -> None:
    third = state_at(5, 7.0)
    case = Case(peers(OTHER, OTHER), peers(third, third))

    assert case.find() is None
    assert case.exchange.asked == []


def test_peers_ahead_come_before_peers_that_differ() -> None:
    case = Case(peers(OTHER, OTHER, LATER), gives=LATER)

    assert case.find() is LATER
    assert case.exchange.asked == [(["p2"], 6)]
    assert case.names() == ["behind"]


def test_winners_that_went_on_meanwhile_are_caught_up_with() -> None:
    case = Case(peers(OTHER, OTHER), peers(LATER, LATER), gives=LATER)

    assert case.find() is LATER
    assert case.exchange.asked == [(["p0", "p1"], 6)]


@pytest.mark.parametrize("claimed", [OTHER, LATER])
def test_peers_that_give_no_state_are_not_asked_again_at_once(claimed: OuterState) -> None:
    case = Case(peers(claimed, claimed), gives=None)

    first, second = case.find(), case.find()

    assert (first, second) == (None, None)
    assert len(case.exchange.asked) == 1
    assert case.tracker.distrusted == ["p0", "p1"]
    assert case.names()[-1] == "waiting"


def test_after_a_minute_they_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(
        healing_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=None)
    )
    case = Case(peers(OTHER, OTHER), gives=None)
    case.find()

    clock[0] += 60.0
    case.exchange.given = OTHER

    assert case.find() is OTHER


def test_a_peer_that_leaves_fetches_nothing() -> None:
    case = Case(peers(OTHER, OTHER, LATER), is_leaving=True)

    assert case.find() is None
    assert case.exchange.asked == []
