"""What counts as lost, and who is told."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from opendiloco.errors import SwarmLostError
from opendiloco.supervisor import Alarm, Watch, Watched
from opendiloco.units import Seconds

TICK = Seconds(0.02)
SOON = 5.0  # seconds; generous, none of it is used when all is well


class Process:
    """A process that answers, or not."""

    def __init__(self, name: str, *, patience: float = 10 * TICK) -> None:
        self.how_it_ended = ""
        self.answers = True
        self.num_questions = 0
        self.watched = Watched(name, lambda: self.how_it_ended, self._ask, Seconds(patience))

    def _ask(self) -> None:
        self.num_questions += 1
        if not self.answers:
            raise SwarmLostError("no answer")


class Watching:
    """A watch, and what it has said."""

    def __init__(self, watch: Watch, alarm: Alarm, said: list[str]) -> None:
        self.watch = watch
        self.alarm = alarm
        self.said = said

    def wait_for_loss(self) -> str:
        assert threading.Event.wait(self.alarm, SOON), "nothing was lost"
        self.watch.close()
        return self.alarm.reason


@pytest.fixture
def watch() -> Iterator[Callable[..., Watching]]:
    with ExitStack() as stack:

        def begin(*processes: Watched) -> Watching:
            said: list[str] = []
            alarm = Alarm(threading.Event())
            made = Watch(processes, alarm=alarm, on_loss=said.append, tick=TICK)
            stack.callback(made.close)
            made.start()
            return Watching(made, alarm, said)

        yield begin


def wait_for_questions(process: Process, count: int) -> None:
    pause = threading.Event()
    for _ in range(int(SOON / TICK)):
        if process.num_questions >= count:
            return
        pause.wait(TICK)
    raise AssertionError(f"only {process.num_questions} questions")


def test_a_process_that_has_ended_is_lost_with_the_way_it_ended(
    watch: Callable[..., Watching],
) -> None:
    process = Process("p2pd", patience=1000.0)
    watching = watch(process.watched)

    process.how_it_ended = "SIGKILL"

    assert watching.wait_for_loss() == "p2pd has ended (SIGKILL)"


def test_a_process_that_never_answers_is_lost(watch: Callable[..., Watching]) -> None:
    process = Process("p2pd")
    process.answers = False

    watching = watch(process.watched)

    assert watching.wait_for_loss() == "p2pd does not answer"


def test_a_question_with_patience_of_its_own_is_believed_at_once(
    watch: Callable[..., Watching],
) -> None:
    process = Process("p2pd", patience=1000.0)
    process.answers = False

    watching = watch(replace(process.watched, is_final=True))

    assert watching.wait_for_loss() == "p2pd does not answer"


def test_one_missed_answer_is_forgiven(watch: Callable[..., Watching]) -> None:
    process = Process("p2pd", patience=1000.0)
    watching = watch(process.watched)

    process.answers = False
    wait_for_questions(process, process.num_questions + 1)
    process.answers = True
    wait_for_questions(process, process.num_questions + 3)

    assert not watching.alarm.is_set()


def test_a_question_that_never_returns_does_not_hide_another_loss(
    watch: Callable[..., Watching],
) -> None:
    stuck = threading.Event()
    blocked = Watched("the DHT's process", lambda: "", lambda: bool(stuck.wait()) or None, 1000.0)
    process = Process("p2pd")
    watching = watch(blocked, process.watched)

    process.how_it_ended = "SIGKILL"
    reason = watching.wait_for_loss()
    stuck.set()

    assert reason == "p2pd has ended (SIGKILL)"


def test_a_question_that_never_returns_counts_as_no_answer(
    watch: Callable[..., Watching],
) -> None:
    stuck = threading.Event()
    blocked = Watched("p2pd", lambda: "", lambda: bool(stuck.wait()) or None, 10 * TICK)

    reason = watch(blocked).wait_for_loss()
    stuck.set()

    assert reason == "p2pd does not answer"


def test_of_two_losses_at_once_the_first_in_the_list_is_named_and_told_once(
    watch: Callable[..., Watching],
) -> None:
    cause, consequence = Process("the DHT's process"), Process("p2pd")
    cause.how_it_ended = consequence.how_it_ended = "SIGKILL"

    watching = watch(cause.watched, consequence.watched)
    watching.wait_for_loss()

    assert watching.said == ["the DHT's process has ended (SIGKILL)"]


def test_nothing_is_lost_after_close(watch: Callable[..., Watching]) -> None:
    process = Process("p2pd")
    watching = watch(process.watched)

    watching.watch.close()
    process.how_it_ended = "exit code 0"

    assert watching.said == []
    assert not watching.alarm.is_set()


def test_an_alarm_is_set_when_the_peer_leaves() -> None:
    leaving = threading.Event()
    alarm = Alarm(leaving)
    before = alarm.is_set()

    leaving.set()

    assert not before
    assert alarm.is_set()


def test_a_peer_that_leaves_has_lost_nothing() -> None:
    leaving = threading.Event()
    leaving.set()

    Alarm(leaving).check()


def test_an_alarm_keeps_the_first_reason() -> None:
    alarm = Alarm(threading.Event())

    news = [alarm.declare("p2pd has ended"), alarm.declare("the DHT's process has ended")]

    assert news == [True, False]
    with pytest.raises(SwarmLostError, match=r"^p2pd has ended$"):
        alarm.check()
