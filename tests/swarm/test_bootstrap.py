import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from opendiloco.addresses import parse_multiaddr
from opendiloco.dht import NetworkOptions, SwarmDHT
from opendiloco.identity import load_or_create_identity
from opendiloco.units import Seconds
from tests.support.network import DEAD

pytestmark = pytest.mark.swarm

Bootstrap = subprocess.Popen[str]
Begin = Callable[..., Bootstrap]

PASTE = "opendiloco peer --initial-peers "


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start `python -m bootstrap` on any free port; kills it in the end."""
    with ExitStack() as stack:

        def run(*arguments: str) -> Bootstrap:
            environment = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith("OPENDILOCO_")
            }
            own = ["--identity", str(tmp_path / "bootstrap.key"), "--out-dir", str(tmp_path)]
            process = subprocess.Popen(
                [sys.executable, "-m", "bootstrap", "--port", "0", *own, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment, "TMPDIR": "/tmp"},
                cwd=Path(__file__).parents[2],
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield run


def line_of(process: Bootstrap) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def tree_of(process: Bootstrap) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_the_printed_line_is_all_that_a_peer_needs(begin: Begin, tmp_path: Path) -> None:
    process = begin()
    address = line_of(process).removeprefix(PASTE).strip()

    options = NetworkOptions(initial_peers=(address,), join_timeout=Seconds(20.0))
    identity = load_or_create_identity(tmp_path / "peer.key")
    with SwarmDHT.start(options, identity, on_retry=lambda _: None) as peer:
        stored = peer.store("key", None, b"value", ttl=Seconds(60.0))

    assert parse_multiaddr(address) == address
    assert stored


def test_stdout_is_one_line_without_loopback(begin: Begin) -> None:
    others = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if re.fullmatch(r"[\d.]+", address.address) and not address.address.startswith("127.")
    ]
    if not others:
        pytest.skip("this machine has no address but loopback")
    process = begin()
    first = line_of(process)
    process.send_signal(signal.SIGTERM)

    rest, _ = process.communicate(timeout=10.0)

    assert first.startswith(f"{PASTE}/ip4/")
    assert "127.0.0.1" not in first
    assert rest == ""


def test_people_are_told_where_the_identity_is_and_what_to_announce(
    begin: Begin, tmp_path: Path
) -> None:
    process = begin("--host", "127.0.0.1")
    line_of(process)
    process.send_signal(signal.SIGTERM)

    _, told = process.communicate(timeout=10.0)

    assert f"identity: {tmp_path / 'bootstrap.key'}" in told
    assert "--announce" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_code_0_and_nothing_left(
    begin: Begin, number: signal.Signals
) -> None:
    process = begin()
    line_of(process)
    tree = tree_of(process)
    (folder,) = _socket_folders(tree)

    process.send_signal(number)

    assert process.wait(10.0) == 0
    assert psutil.wait_procs(tree, timeout=10.0)[1] == []
    assert not folder.exists()


def test_events_tell_when_it_started_and_left(begin: Begin, tmp_path: Path) -> None:
    process = begin()
    peer_id = line_of(process).strip().rpartition("/p2p/")[2]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10.0)

    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]

    assert [event["event"] for event in events] == ["started", "left"]
    assert events[0]["peer_id"] == peer_id
    assert events[1]["reason"] == "SIGTERM"


def test_a_restart_keeps_the_peer_id(begin: Begin) -> None:
    peer_ids = []
    for _ in range(2):
        process = begin()
        peer_ids.append(line_of(process).strip().rpartition("/p2p/")[2])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10.0)

    assert peer_ids[0] == peer_ids[1]


def test_no_child_survives_when_it_is_killed(begin: Begin) -> None:
    process = begin()
    line_of(process)
    tree = tree_of(process)
    assert "p2pd" in {child.name() for child in tree}

    process.kill()
    process.wait()

    assert psutil.wait_procs(tree, timeout=10.0)[1] == []


def test_it_exits_with_code_4_when_p2pd_died(begin: Begin) -> None:
    process = begin()
    line_of(process)
    next(child for child in tree_of(process) if child.name() == "p2pd").kill()

    _, told = process.communicate(timeout=20.0)

    assert process.returncode == 4
    assert told.splitlines()[-1].startswith("opendiloco bootstrap: error: p2pd has ended")


def test_a_signal_while_it_waits_for_a_peer_ends_it_with_code_0(begin: Begin) -> None:
    process = begin("--initial-peers", DEAD)
    assert process.stderr is not None
    assert "trying again" in process.stderr.readline()

    process.send_signal(signal.SIGINT)

    assert process.wait(10.0) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port"),
        (["--host", "somewhere"], "--host: 'somewhere' is no IP address"),
        (["--announce", "203.0.113.7"], "--announce: 203.0.113.7 needs a fixed port"),
        (["--initial-peers", "hello"], "--initial-peers: 'hello': it must begin with /"),
    ],
)
def test_a_wrong_setting_is_one_line_and_code_2(
    begin: Begin, arguments: list[str], message: str
) -> None:
    process = begin(*arguments)

    out, told = process.communicate(timeout=30.0)

    assert process.returncode == 2
    assert out == ""
    assert len(told.splitlines()) == 1
    assert message in told


def test_a_garbage_identity_is_one_line_and_code_2(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "bootstrap.key").write_bytes(b"garbage")
    process = begin()

    _, told = process.communicate(timeout=30.0)

    assert process.returncode == 2
    assert told.startswith("opendiloco bootstrap: error: --identity: ")
    assert len(told.splitlines()) == 1


def _socket_folders(tree: list[psutil.Process]) -> set[Path]:
    options = [option for child in tree if child.name() == "p2pd" for option in child.cmdline()]
    prefix = "-listen=/unix"
    return {Path(option.removeprefix(prefix)).parent for option in options if prefix in option}
