"""A process behind a peer that dies or freezes is noticed within 10 s, and repaired."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.peers import (
    Event,
    Launcher,
    PeerProcess,
    gone,
    launcher,
    seconds_until_gone,
)
from tests.support.swarm import wait_until

pytestmark = pytest.mark.swarm

NOTICE = 10.0  # seconds that README promises
SPAN = ("--diloco.inner-steps=20", "--inner.batch-size=32", "--inner.micro-batch-size=32")
"""A span of several seconds."""


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Launcher]:
    with launcher(tmp_path) as made:
        yield made


def child(peer: PeerProcess, name: str) -> psutil.Process:
    """Return the peer's child of this name, as `ps` shows it."""
    children = psutil.Process(peer.process.pid).children(recursive=True)
    (found,) = [process for process in children if process.name() == name]
    return found


def hit(process: psutil.Process, number: signal.Signals) -> float:
    """Send a signal and see that it hit; returns the instant at which it was sent."""
    sent_at = time.time()
    process.send_signal(number)
    if number is signal.SIGSTOP:
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the process is stopped")
    else:
        wait_until(lambda: gone([process]), "the process is gone")
    return sent_at


def later_round(peer: PeerProcess, event: Event) -> Event:
    """Return the first round after the event that was averaged with others."""

    def found() -> list[Event]:
        return [
            round_
            for round_ in peer.events("round")
            if float(str(round_["t"])) > float(str(event["t"])) and round_["outcome"] == "averaged"
        ]

    wait_until(lambda: found() != [] or peer.process.poll() is not None, "a round", within=60.0)
    assert found(), peer.stderr
    return found()[0]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.faults),
    ],
)
@pytest.mark.parametrize("name", ["p2pd", "dht", "averager"])
def test_what_is_lost_during_inner_steps_is_noticed_and_repaired(
    peers: Launcher, name: str, number: signal.Signals
) -> None:
    first = peers.start("first", "--new-swarm", "--network.min-peers=2", *SPAN)
    second = peers.start("second", "--network.min-peers=2", *SPAN, joins=first)
    address = second.address()
    second.wait_for("outer_step")
    second.wait_for("inner", count=len(second.events("inner")) + 1)

    hit_at = hit(child(second, name), number)
    lost = second.wait_for("lost", within=2 * NOTICE)
    repaired = second.wait_for("repaired")
    averaged = later_round(second, repaired)

    assert float(str(lost["t"])) - hit_at < NOTICE
    assert ("has ended" if number is signal.SIGKILL else "does not answer") in str(lost["reason"])
    assert name in str(lost["reason"]).lower()
    assert averaged["num_peers"] == 2
    child(second, "p2pd")
    assert second.process.poll() is None
    listening = {
        f"/ip4/127.0.0.1/tcp/{connection.laddr.port}/p2p/{address.rpartition('/')[2]}"
        for connection in child(second, "p2pd").net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {address}


@pytest.mark.faults
def test_a_loss_while_a_peer_waits_for_a_slower_one_ends_the_wait(peers: Launcher) -> None:
    fast = peers.start("fast", "--new-swarm", "--network.min-peers=2")
    slow = peers.start("slow", "--network.min-peers=2", "--inner.batch-size=4096", joins=fast)
    slow.wait_for("joined")
    fast.wait_for("inner", count=2)

    hit_at = hit(child(fast, "dht"), signal.SIGSTOP)
    lost = fast.wait_for("lost")
    failed = fast.wait_for("round")
    fast.wait_for("repaired")

    assert float(str(lost["t"])) - hit_at < NOTICE
    assert failed["outcome"] == "failed"
    assert float(str(failed["t"])) - float(str(lost["t"])) < NOTICE


@pytest.mark.faults
def test_a_founder_whose_p2p_daemon_dies_finds_the_others_again(peers: Launcher) -> None:
    # OpenMP's threads do not survive the fork of a repair; nothing may wait for them.
    first = peers.start("first", "--new-swarm", "--network.min-peers=2", *SPAN, OMP_NUM_THREADS="2")
    second = peers.start("second", "--network.min-peers=2", *SPAN, joins=first)
    joined = first.wait_for("joined")
    wait_until(
        lambda: time.time() - float(str(joined["t"])) > 15.0,
        "the founder has noted where the others are",
        within=20.0,
    )

    hit(child(first, "p2pd"), signal.SIGKILL)
    repaired = first.wait_for("repaired")

    assert later_round(first, repaired)["num_peers"] == 2
    assert later_round(second, repaired)["num_peers"] == 2


@pytest.mark.faults
def test_a_peer_whose_daemon_dies_with_the_bootstrap_joins_by_the_others(peers: Launcher) -> None:
    first = peers.start("first", "--new-swarm", "--network.min-peers=3", *SPAN)
    second = peers.start("second", "--network.min-peers=3", *SPAN, joins=first)
    third = peers.start("third", "--network.min-peers=3", *SPAN, joins=first)
    joined = third.wait_for("joined")
    wait_until(
        lambda: time.time() - float(str(joined["t"])) > 15.0,
        "the third peer has noted where the others are",
        within=20.0,
    )

    first.send(signal.SIGKILL)
    hit(child(third, "p2pd"), signal.SIGKILL)
    repaired = third.wait_for("repaired")

    assert later_round(third, repaired)["num_peers"] == 2
    assert second.process.poll() is None


@pytest.mark.faults
def test_a_peer_that_was_frozen_as_a_whole_does_not_take_its_processes_for_lost(
    peers: Launcher,
) -> None:
    peer = peers.start("peer", "--new-swarm", *SPAN)
    peer.wait_for("outer_step")
    tree = peer.tree()

    for process in tree:
        process.suspend()
    frozen_at = time.monotonic()
    wait_until(lambda: time.monotonic() - frozen_at > 12.0, "longer than anybody's patience")
    for process in reversed(tree):
        process.resume()
    peer.wait_for("outer_step", count=len(peer.events("outer_step")) + 2)

    assert peer.events("lost") == []


@pytest.mark.faults
def test_a_process_that_dies_again_and_again_ends_the_peer_with_code_4(peers: Launcher) -> None:
    peer = peers.start("peer", "--new-swarm", *SPAN)
    peer.wait_for("joined")

    for count in range(1, 4):
        hit(child(peer, "dht"), signal.SIGKILL)
        peer.wait_for("repaired", count=count)
    tree = peer.tree()
    hit(child(peer, "dht"), signal.SIGKILL)

    assert peer.wait() == 4
    seconds_until_gone(tree, within=NOTICE)
    (line,) = peer.stderr.strip().splitlines()
    assert "the DHT's process has ended (SIGKILL" in line
    assert "after 3 repairs within 10 minutes" in line


def test_a_peer_that_is_lost_while_it_waits_for_others_ends_with_code_4(peers: Launcher) -> None:
    peer = peers.start("peer", "--new-swarm", "--network.min-peers=2")
    peer.wait_for("waiting")

    hit(child(peer, "p2pd"), signal.SIGKILL)

    assert peer.wait(within=2 * NOTICE) == 4
    (line,) = peer.stderr.strip().splitlines()
    assert "p2pd has ended" in line


@pytest.mark.faults
def test_a_signal_during_a_repair_ends_the_peer_in_good_order(peers: Launcher) -> None:
    first = peers.start("first", "--new-swarm", "--network.min-peers=2", *SPAN)
    second = peers.start("second", "--network.min-peers=2", *SPAN, joins=first)
    second.wait_for("outer_step")
    first.send(signal.SIGKILL)
    first.wait()
    hit(child(second, "p2pd"), signal.SIGKILL)
    second.wait_for("waiting", count=len(second.events("waiting")) + 1)  # nobody is left
    tree = second.tree()

    second.send(signal.SIGTERM)

    assert second.wait(within=NOTICE) == 0
    seconds_until_gone(tree, within=NOTICE)
    assert second.events("left")[0]["reason"] == "SIGTERM"


def test_p2pd_dials_from_other_ports_than_it_listens_on(peers: Launcher) -> None:
    peer = peers.start("peer", "--new-swarm")
    peer.wait_for("started")

    environment = child(peer, "p2pd").environ()

    assert environment["LIBP2P_TCP_REUSEPORT"] == "0"
