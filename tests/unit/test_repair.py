"""When a lost swarm side is repaired, and when the peer ends instead."""

import signal
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opendiloco.errors import JoinError, OpenDiLoCoError, SwarmLostError
from opendiloco.events import Event, EventLog
from opendiloco.leaving import LeaveRequestedError, Leaving
from opendiloco.progress.records import PeerRecord, decode_record
from opendiloco.progress.tracker import ProgressTracker
from opendiloco.units import Seconds
from peers.repair import Repairer
from tests.support.averagers import ManualAverager
from tests.support.outer_loop import Peer as OuterLoop
from tests.support.outer_loop import flat, model, trained

LOCAL = {"weight": torch.zeros(1)}


class LostPeer:
    """Stands for a peer's connection and seat."""

    def __init__(self, *, fails_with: BaseException | None = None) -> None:
        self.events: list[Event] = []
        self.leaving = Leaving()
        self.num_reopened = 0
        self.went_on_with: list[Any] = []
        self._fails_with = fails_with
        connection = SimpleNamespace(report_loss=lambda reason: None, reopen=self._reopen)
        seat = SimpleNamespace(go_on=self.went_on_with.append)
        self.repairer = Repairer(
            connection,  # type: ignore[arg-type]
            seat,  # type: ignore[arg-type]
            log=EventLog(None, listener=self.events.append),
            leaving=self.leaving,
        )

    def _reopen(self) -> None:
        self.num_reopened += 1
        if self._fails_with is not None:
            raise self._fails_with


def test_after_a_repair_the_seat_goes_on_with_the_local_parameters() -> None:
    peer = LostPeer()

    peer.repairer.repair("p2pd has ended", LOCAL)

    assert peer.went_on_with == [LOCAL]
    assert [event["event"] for event in peer.events] == ["repaired"]


def test_the_remedy_of_the_error_is_left_out_of_the_event() -> None:
    peer = LostPeer()

    peer.repairer.repair("p2pd has ended (SIGKILL; no memory); start this peer again", LOCAL)

    assert peer.events[0]["reason"] == "p2pd has ended (SIGKILL; no memory)"


def test_the_fourth_repair_within_ten_minutes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = LostPeer()
    clock = iter([0.0, 0.0, 100.0, 100.0, 200.0, 200.0, 599.0])
    monkeypatch.setattr("peers.repair.time.monotonic", lambda: next(clock))
    for _ in range(3):
        peer.repairer.repair("p2pd has ended", LOCAL)

    with pytest.raises(SwarmLostError, match="p2pd has ended, after 3 repairs within 10 minutes"):
        peer.repairer.repair("p2pd has ended", LOCAL)
    assert peer.num_reopened == 3


def test_repairs_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = LostPeer()
    clock = iter([0.0, 0.0, 100.0, 100.0, 200.0, 200.0, 601.0, 601.0])
    monkeypatch.setattr("peers.repair.time.monotonic", lambda: next(clock))

    for _ in range(4):
        peer.repairer.repair("p2pd has ended", LOCAL)

    assert peer.num_reopened == 4


@pytest.mark.parametrize("error", [JoinError("nobody there"), SwarmLostError("nobody there")])
def test_what_cannot_be_started_again_ends_the_peer_with_code_4(error: OpenDiLoCoError) -> None:
    peer = LostPeer(fails_with=error)

    with pytest.raises(SwarmLostError, match=r"p2pd has ended, .*: nobody there") as raised:
        peer.repairer.repair("p2pd has ended", LOCAL)

    assert raised.value.exit_code == 4


def test_a_peer_that_is_told_to_leave_meanwhile_is_not_repaired() -> None:
    peer = LostPeer(fails_with=LeaveRequestedError("SIGTERM"))

    report = peer.repairer.repair("p2pd has ended", LOCAL)

    assert report is None
    assert peer.went_on_with == []


def test_a_peer_that_leaves_already_is_not_repaired() -> None:
    peer = LostPeer()
    peer.leaving.event.set()

    peer.repairer.repair("p2pd has ended", LOCAL)

    assert peer.num_reopened == 0


def test_a_signal_interrupts_a_repair() -> None:
    leaving = Leaving()

    with pytest.raises(LeaveRequestedError), leaving.interrupting():
        leaving._on_signal(signal.SIGTERM, None)

    assert leaving.event.is_set()


def test_a_signal_after_a_repair_interrupts_nothing() -> None:
    leaving = Leaving()
    with leaving.interrupting():
        pass

    leaving._on_signal(signal.SIGTERM, None)

    assert leaving.event.is_set()


def test_a_round_in_flight_is_given_up_and_its_work_is_in_the_next_one() -> None:
    peer = OuterLoop()
    local = trained(model(), seed=1)
    peer.begin(local, num_tokens=300)
    second = ManualAverager()

    peer.diloco.replace_averager(second)
    was_in_flight = peer.diloco.in_flight
    peer.diloco.begin_round(local)

    assert not was_in_flight
    assert second.requests[0].num_tokens == 300
    contribution = second.contribution(len(flat(local))).numpy()
    np.testing.assert_array_equal(contribution, flat(model()) - flat(local))


class Board:
    """Stands for a DHT: keeps what is stored, and holds one other peer's record."""

    owner_subkey = b"me"

    def __init__(self) -> None:
        self.stored: list[PeerRecord] = []
        self.has_stored = threading.Event()

    def store(self, _key: str, _subkey: object, value: bytes, *, ttl: Seconds) -> bool:
        record = decode_record(value)
        assert record is not None
        self.stored.append(record)
        self.has_stored.set()
        return ttl > 0

    def get(self, _key: str) -> dict[bytes, tuple[bytes, float]]:
        return {}


def test_the_record_goes_on_in_another_dht_where_it_was() -> None:
    first, second = Board(), Board()
    tracker = ProgressTracker(
        first,  # type: ignore[arg-type]
        PeerRecord(peer_id="me"),
        run_id="run",
        heartbeat=Seconds(60.0),
        max_age=Seconds(60.0),
    )
    tracker.start()
    tracker.update(state="training", outer_step=7)
    assert first.has_stored.wait(5.0)

    tracker.pause()
    tracker.resume(second)  # type: ignore[arg-type]
    assert second.has_stored.wait(5.0)
    tracker.pause()

    assert "leaving" not in {record.state for record in first.stored}
    assert (second.stored[0].state, second.stored[0].outer_step) == ("training", 7)
    assert second.stored[0].sequence > first.stored[-1].sequence
