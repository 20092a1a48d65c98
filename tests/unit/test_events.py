"""The event log: whole lines of plain JSON, whatever the disk does."""

import json
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest

from opendiloco import events
from opendiloco.errors import ConfigError
from opendiloco.events import Event, EventLog
from opendiloco.units import UnixTime

NUM_THREADS = 8
NUM_EVENTS = 100


def lines(path: Path) -> list[Event]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_an_event_is_one_json_object_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "now", lambda: UnixTime(1234.5))
    log = EventLog(tmp_path / "events.jsonl")

    log.emit("joined", outer_step=3, seconds=0.5, **{"from": "swarm"})
    log.emit("left", reason="told\nto", ok=True, path=None)
    log.close()

    assert lines(tmp_path / "events.jsonl") == [
        {"t": 1234.5, "event": "joined", "outer_step": 3, "seconds": 0.5, "from": "swarm"},
        {"t": 1234.5, "event": "left", "reason": "told\nto", "ok": True, "path": None},
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_know_is_null(tmp_path: Path, value: float) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    log.emit("inner", loss=value)
    log.close()

    assert lines(tmp_path / "events.jsonl")[0]["loss"] is None


def test_an_event_can_be_read_before_the_log_is_closed(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    log.emit("started")
    read = lines(tmp_path / "events.jsonl")
    log.close()

    assert [event["event"] for event in read] == ["started"]


class SlowFile:
    """A file that lets other threads run in the middle of a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> None:
        self._file.write(line[:50])
        time.sleep(0)
        self._file.write(line[50:])

    def close(self) -> None:
        self._file.close()


def test_threads_do_not_mix_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert log._file is not None
    monkeypatch.setattr(log, "_file", SlowFile(log._file))
    together = threading.Barrier(NUM_THREADS)

    def emit_many(thread: int) -> None:
        together.wait()
        for number in range(NUM_EVENTS):
            log.emit("inner", thread=thread, number=number, text=str(thread) * 200)

    threads = [threading.Thread(target=emit_many, args=(n,)) for n in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()

    written = lines(tmp_path / "events.jsonl")
    for thread in range(NUM_THREADS):
        numbers = [event["number"] for event in written if event["thread"] == thread]
        assert numbers == list(range(NUM_EVENTS))


def test_a_log_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    for name in ("started", "joined"):
        log = EventLog(tmp_path / "events.jsonl")
        log.emit(name)
        log.close()

    assert [event["event"] for event in lines(tmp_path / "events.jsonl")] == ["started", "joined"]


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "runs" / "first" / "events.jsonl")
    log.close()

    assert (tmp_path / "runs" / "first" / "events.jsonl").exists()


def test_a_folder_that_cannot_be_written_is_one_line_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ConfigError, match=r"^--out-dir: cannot write .*; choose another folder$"):
        EventLog(tmp_path / "file" / "events.jsonl")


def test_a_full_disk_is_reported_once_and_stops_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard: list[Event] = []
    log = EventLog(Path("/dev/full"), listener=heard.append)

    for number in range(3):
        log.emit("inner", number=number)
    log.close()

    assert [event["number"] for event in heard] == [0, 1, 2]
    assert capsys.readouterr().err == "events are no longer written: No space left on device\n"


def test_a_listener_hears_what_is_written(tmp_path: Path) -> None:
    heard: list[Event] = []
    log = EventLog(tmp_path / "events.jsonl", listener=heard.append)

    log.emit("inner", loss=float("nan"))
    log.close()

    assert heard == lines(tmp_path / "events.jsonl")


def test_without_a_file_only_the_listener_hears() -> None:
    heard: list[Event] = []
    log = EventLog(None, listener=heard.append)

    log.emit("started")
    log.close()

    assert [event["event"] for event in heard] == ["started"]


def test_a_closed_log_writes_nothing_more_and_can_be_closed_again(tmp_path: Path) -> None:
    heard: list[Event] = []
    log = EventLog(tmp_path / "events.jsonl", listener=heard.append)

    log.close()
    log.close()
    log.emit("left")

    assert lines(tmp_path / "events.jsonl") == []
    assert len(heard) == 1


def test_a_terminal_that_is_gone_does_not_stop_the_log(tmp_path: Path) -> None:
    calls = []

    def closed_pipe(event: Event) -> None:
        calls.append(event)
        raise BrokenPipeError

    log = EventLog(tmp_path / "events.jsonl", listener=closed_pipe)
    log.emit("started")
    log.emit("left")
    log.close()

    assert len(calls) == 1
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2
