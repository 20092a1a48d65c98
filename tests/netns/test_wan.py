"""The emulated WAN is what it says: these are checked with plain sockets, on plain clocks."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wan.emulation import Wan, WanHost

_NEEDED = ("cc", "ip", "iptables-legacy")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not all(map(shutil.which, _NEEDED)),
    reason=f"needs root, /dev/net/tun and {', '.join(_NEEDED)}",
)

DIAL = """
import socket, sys, time
began_at = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 9), timeout=0.6)
except ConnectionRefusedError:
    print(time.monotonic() - began_at)
except TimeoutError:
    print(-1)
"""
"""Prints how long it takes to be told that nobody listens; -1 if nothing is heard."""

RECEIVE = """
import socket
server = socket.create_server(("", 9000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
connection.sendall(b"!")
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9000))
began_at = time.monotonic()
connection.sendall(bytes(2_500_000))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - began_at)
"""
"""Prints how long 20 Mbit take."""


@pytest.fixture
def wan() -> Iterator[Wan]:
    """Two hosts on a line of 20 Mbit/s and 60 ms, and one behind NAT."""
    host = WanHost(up=20, down=20, delay_ms=15)
    with Wan([host, host, WanHost(delay_ms=15, nat=True)]) as wan:
        yield wan


def run(wan: Wan, index: int, script: str, *arguments: str) -> float:
    """Run a script on a host, and return the number that it prints."""
    done = subprocess.run(
        [*wan.launcher(index), sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def test_a_round_trip_takes_twice_the_sum_of_both_delays(wan: Wan) -> None:
    seconds = run(wan, 0, DIAL, wan.addresses[1])

    assert 0.06 <= seconds < 0.3


def test_a_changed_delay_holds_at_once(wan: Wan) -> None:
    wan.set_delay(1, 115)

    assert 0.26 <= run(wan, 0, DIAL, wan.addresses[1]) < 0.5


def test_a_line_carries_no_more_than_its_rate(wan: Wan) -> None:
    receiver = subprocess.Popen(
        [*wan.launcher(1), sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    with receiver, receiver.stdout:
        receiver.stdout.readline()
        seconds = run(wan, 0, SEND, wan.addresses[1])

    assert 1.0 <= seconds < 4.0


def test_nothing_passes_where_the_line_is_cut(wan: Wan) -> None:
    wan.cut(0, 1)

    assert run(wan, 0, DIAL, wan.addresses[1]) == -1


def test_a_healed_line_is_as_before(wan: Wan) -> None:
    wan.cut(0, 1)
    wan.heal(0, 1)

    assert run(wan, 0, DIAL, wan.addresses[1]) > 0


def test_a_host_behind_nat_reaches_others(wan: Wan) -> None:
    assert run(wan, 2, DIAL, wan.addresses[0]) > 0


def test_a_host_behind_nat_cannot_be_reached(wan: Wan) -> None:
    assert run(wan, 0, DIAL, "10.77.0.3") == -1


def test_traffic_is_counted_at_both_ends(wan: Wan) -> None:
    run(wan, 0, DIAL, wan.addresses[1])

    sender, receiver, _ = wan.traffic()
    assert sender.num_sent == receiver.num_received > 0


def test_a_closed_wan_leaves_no_namespace_behind() -> None:
    with Wan([WanHost(), WanHost(nat=True)]) as wan:
        ours = {wan.launcher(index)[-1] for index in range(2)}

    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)  # noqa: S607
    assert not [name for name in ours if name in left.stdout]
