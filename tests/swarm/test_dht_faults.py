import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from hivemind.utils import MPFuture

from opendiloco.dht import SwarmDHT
from opendiloco.dht_process import forget_killed_children
from opendiloco.errors import SwarmLostError
from opendiloco.units import Seconds, now
from tests.support.network import A_MINUTE, DEAD, StartDHT, children

pytestmark = pytest.mark.swarm


def test_check_is_silent_while_everything_works(start_dht: StartDHT) -> None:
    peer = start_dht("peer")

    peer.check()


def _p2pd() -> psutil.Process:
    return next(child for child in children() if child.name() == "p2pd")


def _kill_dht(peer: SwarmDHT) -> None:
    with MPFuture._update_lock:  # whoever dies with it blocks all futures of this process
        peer.dht.kill()
        peer.dht.join()


def _freeze_dht(peer: SwarmDHT) -> psutil.Process:
    process = psutil.Process(peer.dht.pid)
    with MPFuture._update_lock:
        process.suspend()
    return process


def test_check_tells_that_p2pd_ended(start_dht: StartDHT) -> None:
    peer = start_dht("peer")
    _p2pd().kill()

    with pytest.raises(SwarmLostError, match="p2pd has ended"):
        peer.check()


def test_check_tells_that_the_process_of_the_dht_ended(start_dht: StartDHT) -> None:
    peer = start_dht("peer")
    _kill_dht(peer)

    with pytest.raises(SwarmLostError, match="the DHT's process has ended"):
        peer.check()


def test_calls_return_when_the_process_of_the_dht_ended(start_dht: StartDHT) -> None:
    peer = start_dht("peer")
    _kill_dht(peer)

    stored = peer.store("key", None, b"value", ttl=A_MINUTE)

    assert not stored
    assert peer.get("key") == {}


def test_check_tells_that_the_dht_is_frozen_and_close_still_ends_it(
    start_dht: StartDHT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendiloco.dht._PATIENCE", Seconds(1.0))
    peer = start_dht("peer")
    _freeze_dht(peer)

    with pytest.raises(SwarmLostError, match="the DHT's process does not answer"):
        peer.check()

    peer.close()
    assert children() == []


def test_calls_to_a_frozen_dht_return_however_many_there_are(
    start_dht: StartDHT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendiloco.dht_process._CALL_TIMEOUT", Seconds(0.1))
    peer = start_dht("peer")
    process = _freeze_dht(peer)

    stored = [peer.store("key", None, bytes(4096), ttl=A_MINUTE) for _ in range(40)]

    process.resume()
    assert not any(stored)


def test_check_tells_that_p2pd_is_frozen(
    start_dht: StartDHT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendiloco.dht._PATIENCE", Seconds(1.0))
    peer = start_dht("peer")
    _p2pd().suspend()

    with pytest.raises(SwarmLostError, match="p2pd does not answer"):
        peer.check()


def test_a_dht_can_be_started_again_after_one_was_killed_in_mid_sentence(
    start_dht: StartDHT,
) -> None:
    first = start_dht("peer")
    hurt = MPFuture._update_lock
    hurt.acquire()  # as the child does to answer, and it never gives it back when it is killed
    first.kill()
    first.close()

    forget_killed_children()
    second = start_dht("peer")
    second.check()

    assert second.peer_id == first.peer_id
    assert second.store("key", None, b"value", ttl=A_MINUTE)
    assert second.get("key")[None][0] == b"value"
    hurt.release()


def test_connected_peers_are_found_where_they_listen(start_dht: StartDHT) -> None:
    first = start_dht("first")
    second = start_dht("second", first.addresses()[0])

    found = first.find([second.peer_id, DEAD.rpartition("/")[2]])

    assert found == {second.peer_id: second.addresses()}


def test_the_process_of_the_dht_can_be_told_by_its_name(start_dht: StartDHT) -> None:
    peer = start_dht("peer")

    assert psutil.Process(peer.dht.pid).name() == "dht"


def test_close_leaves_nothing_and_may_be_called_twice(
    start_dht: StartDHT, temporary_folder: Path
) -> None:
    peer = start_dht("peer")

    peer.close()
    peer.close()

    assert children() == []
    assert list(temporary_folder.iterdir()) == []


def test_calls_after_close_find_nothing(start_dht: StartDHT) -> None:
    peer = start_dht("peer")
    peer.close()

    assert peer.get("key") == {}


PEER_SCRIPT = """
import signal, sys, time
from pathlib import Path
from opendiloco.dht import NetworkOptions, SwarmDHT
from opendiloco.identity import load_or_create_identity
from opendiloco.units import Seconds

def say(line):
    print(line, flush=True)

options = NetworkOptions(host="127.0.0.1", initial_peers=tuple(sys.argv[2:]))
with SwarmDHT.start(options, load_or_create_identity(Path(sys.argv[1])), on_retry=say) as peer:
    say("started")
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a peer in a process of its own; the test ends it."""
    with ExitStack() as stack:

        def begin(*initial_peers: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", PEER_SCRIPT, str(tmp_path / "script.key"), *initial_peers],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield begin


def test_no_child_survives_a_killed_peer(script: Callable[..., subprocess.Popen[str]]) -> None:
    process = script()
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    tree = psutil.Process(process.pid).children(recursive=True)
    assert "p2pd" in {child.name() for child in tree}
    assert len(tree) >= 2

    process.kill()
    process.wait()

    _, alive = psutil.wait_procs(tree, timeout=10.0)
    assert alive == []


def test_an_interrupt_while_joining_leaves_no_process(
    script: Callable[..., subprocess.Popen[str]],
) -> None:
    process = script(DEAD)
    assert process.stdout is not None
    assert "trying again" in process.stdout.readline()
    tree = psutil.Process(process.pid).children(recursive=True)

    process.send_signal(signal.SIGINT)

    process.wait(10.0)
    _, alive = psutil.wait_procs(tree, timeout=10.0)
    assert alive == []


def test_a_ctrl_c_does_not_reach_the_children(start_dht: StartDHT) -> None:
    peer = start_dht("peer")

    for child in children():
        if os.getpgid(child.pid) == os.getpgid(0):  # as the terminal chooses whom to interrupt
            os.kill(child.pid, signal.SIGINT)

    peer.check()


def test_what_killed_peers_left_behind_is_removed_at_the_next_start(
    start_dht: StartDHT, temporary_folder: Path
) -> None:
    stale = temporary_folder / "opendiloco-p2pd-old"
    stale.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale / "p2pd.sock"))
    os.utime(stale, (now() - 3600, now() - 3600))

    start_dht("peer")

    assert not stale.exists()
