"""The demo as a person runs it: what it says is true, and no process is left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.swarm import wait_until

# About 40 s when it has two cores for itself; the limit is for machines that are busy.
pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

NUM_OUTER_STEPS = 7


def events_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
    ]


def process_groups(folder: Path) -> set[int]:
    """Return the groups of all peers that the demo has started; each leads its own."""
    events = events_of(folder / "events.jsonl")
    return {event["pid"] for event in events if event["event"] == "peer_started"}


def left_behind(folder: Path) -> list[str]:
    """Return the command lines of live processes that belong to a demo."""
    groups = process_groups(folder)
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        line = " ".join(process.info["cmdline"] or [])
        try:
            is_ours = os.getpgid(process.pid) in groups
        except ProcessLookupError:
            continue
        if is_ours or f"{folder}/" in line:
            found.append(line)
    return found


def start_demo(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "opendiloco", "demo", "--out-dir", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class Finished:
    """A demo that has ended."""

    folder: Path
    code: int
    out: str
    err: str
    still_there: list[str]

    @property
    def result(self) -> dict[str, Any]:
        outcome: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return outcome


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("demo")
    with start_demo(
        folder,
        "--json",
        "--peers",
        "2",
        "--outer-steps",
        str(NUM_OUTER_STEPS),
        "--inner-steps",
        "4",
    ) as process:
        out, err = process.communicate(timeout=270)
    return Finished(folder, process.returncode, out, err, left_behind(folder))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo with one peer, at its first inner steps."""
    process = start_demo(tmp_path, "--peers", "1")
    try:
        log = tmp_path / "peer-1" / "events.jsonl"
        wait_until(
            lambda: any(event["event"] == "inner" for event in events_of(log)),
            "the peer trains",
            within=60.0,
        )
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_demo_succeeds_without_problems(demo: Finished) -> None:
    assert (demo.code, demo.result["problems"]) == (0, []), demo.err


def test_stdout_is_one_json_object_when_asked_for(demo: Finished) -> None:
    assert len(demo.out.splitlines()) == 1


def test_all_outer_steps_are_committed_and_the_loss_falls(demo: Finished) -> None:
    assert demo.result["outer_steps"] == NUM_OUTER_STEPS
    assert demo.result["loss_last"] < demo.result["loss_first"] - 1.0


def test_tokens_are_those_of_all_peers_rounds(demo: Finished) -> None:
    contributions = demo.result["contributions"].values()
    rounds = sum(given["rounds"] for given in contributions)
    trained = sum(given["tokens"] for given in contributions)

    # Nobody's inner steps count twice. A peer's first span may have fewer, to be ready with the
    # others; and a round may contain a killed peer that could not log it any more.
    assert demo.result["tokens"] <= trained
    assert demo.result["tokens"] >= (rounds - len(contributions)) * 4 * 12 * 128


def test_one_peer_is_killed_and_its_log_ends_there(demo: Finished) -> None:
    (kill,) = [e for e in events_of(demo.folder / "events.jsonl") if e["event"] == "killed"]
    last = events_of(demo.folder / "peer-2" / "events.jsonl")[-1]

    assert demo.result["killed"] == kill["name"] == "peer-2"
    assert last["event"] != "left"
    assert last["t"] <= kill["t"]


def test_the_newcomer_downloads_the_state_and_averages_with_others(demo: Finished) -> None:
    events = events_of(demo.folder / "peer-3" / "events.jsonl")
    (joined,) = [event for event in events if event["event"] == "joined"]
    sizes = [event["num_peers"] for event in events if event["event"] == "round"]

    assert demo.result["joined"] == "peer-3"
    assert joined["from"] == "swarm"
    assert joined["bytes"] > 0
    assert 2 in sizes


def test_identical_is_claimed_only_when_the_digests_are_equal(demo: Finished) -> None:
    digests = {
        events_of(demo.folder / name / "events.jsonl")[-1]["digest"]
        for name in ("peer-1", "peer-3")
    }

    assert demo.result["identical"] == (len(digests) == 1)
    assert 0.0 <= demo.result["largest_difference"] < 0.01


def test_the_loss_curve_is_drawn(demo: Finished) -> None:
    assert (demo.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_no_process_is_left_after_a_whole_demo(demo: Finished) -> None:
    assert demo.still_there == []


def test_ctrl_c_ends_everything_within_ten_seconds_and_without_a_traceback(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=10.0)

    assert running.returncode == 130
    assert err.splitlines() == ["interrupted; all processes of the demo have ended"]
    assert left_behind(tmp_path) == []


def test_nothing_outlives_a_demo_that_is_killed(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    running.kill()

    wait_until(lambda: left_behind(tmp_path) == [], "all processes end", within=10.0)


def test_a_peer_that_dies_by_itself_ends_the_demo_with_its_name(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    (peer,) = process_groups(tmp_path)

    os.kill(peer, signal.SIGKILL)
    _, err = running.communicate(timeout=20.0)

    assert running.returncode == 1
    assert err.splitlines()[-1].startswith("opendiloco demo: error: peer-1 ended with SIGKILL")
    assert left_behind(tmp_path) == []
