"""However a peer ends, all of it ends, soon, with the right exit code."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.peers import Launcher, launcher, seconds_until_gone
from tests.support.swarm import wait_until

pytestmark = pytest.mark.swarm

GRACE = 10.0  # seconds that design and README promise


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Launcher]:
    with launcher(tmp_path) as made:
        yield made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_training_ends_the_peer_in_good_order(
    peers: Launcher, number: signal.Signals
) -> None:
    peer = peers.start("peer", "--new-swarm")
    peer.wait_for("outer_step", count=2)
    tree = peer.tree()

    peer.send(number)
    seconds = seconds_until_gone(tree, within=GRACE)

    assert peer.wait() == 0
    assert len(tree) >= 4  # the peer, p2pd, the DHT, the averager
    assert seconds < GRACE
    assert peer.events("left")[0]["reason"] == number.name
    assert (peer.out_dir / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_joining_ends_the_peer(peers: Launcher, number: signal.Signals) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
    peer = peers.start("peer", f"--initial-peers={nobody}")
    waiting = peer.wait_for("waiting")
    tree = peer.tree()

    peer.send(number)
    seconds_until_gone(tree, within=GRACE)

    assert "connection refused" in str(waiting["text"])
    assert peer.wait() == 0
    assert "Traceback" not in peer.stderr


def test_a_signal_while_waiting_for_a_slower_peer_ends_the_peer(peers: Launcher) -> None:
    fast = peers.start("fast", "--new-swarm", "--network.min-peers=2")
    slow = peers.start("slow", "--network.min-peers=2", "--inner.batch-size=4096", joins=fast)
    slow.wait_for("joined")
    fast.wait_for("inner", count=2)
    tree = fast.tree()

    fast.send(signal.SIGTERM)
    seconds_until_gone(tree, within=GRACE)

    assert fast.wait() == 0
    assert fast.events("round")[0]["outcome"] == "failed"
    assert fast.events("round")[0]["reason"] == "this peer leaves"


def test_a_second_ctrl_c_ends_the_peer_at_once(peers: Launcher) -> None:
    peer = peers.start("peer", "--new-swarm", "--inner.batch-size=8192")
    peer.wait_for("joined")
    tree = peer.tree()

    peer.send(signal.SIGINT)
    wait_until(lambda: "press Ctrl-C again" in peer.stderr, "the first Ctrl-C is acknowledged")
    peer.send(signal.SIGINT)
    seconds_until_gone(tree, within=3.0)

    assert peer.wait() == 130


def test_all_children_end_when_the_peer_is_killed(peers: Launcher) -> None:
    peer = peers.start("peer", "--new-swarm")
    peer.wait_for("outer_step")
    tree = peer.tree()

    peer.send(signal.SIGKILL)
    seconds_until_gone(tree, within=GRACE)

    assert peer.wait() == -signal.SIGKILL
    assert len(tree) >= 4


def test_the_others_go_on_when_one_of_three_is_killed(peers: Launcher) -> None:
    arguments = ("--network.min-peers=3", "--inner.batch-size=64", "--inner.micro-batch-size=64")
    first = peers.start("first", "--new-swarm", *arguments)
    second = peers.start("second", *arguments, joins=first)
    third = peers.start("third", *arguments, joins=first)
    for peer in peers.peers:
        peer.wait_for("outer_step", count=2)
    killed_at = len(first.events("round"))

    third.send(signal.SIGKILL)
    first.wait_for("round", count=killed_at + 4)
    second.wait_for("round", count=killed_at + 4)
    first.send(signal.SIGTERM)
    second.send(signal.SIGTERM)

    assert first.wait() == second.wait() == 0
    assert third.wait() == -signal.SIGKILL
    for peer in (first, second):
        rounds = peer.events("round")
        assert rounds[0]["num_peers"] == 3
        assert {event["num_peers"] for event in rounds[killed_at + 2 : killed_at + 4]} == {2}
