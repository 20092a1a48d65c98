import socket
import time
from pathlib import Path

import pytest

from opendiloco.errors import ConfigError, JoinError, OpenDiLoCoError, SwarmLostError
from opendiloco.identity import load_or_create_identity
from opendiloco.units import Seconds
from tests.support.network import A_MINUTE, DEAD, StartDHT, children, free_port

pytestmark = pytest.mark.swarm


def test_a_dead_address_beside_a_live_one_does_not_matter(start_dht: StartDHT) -> None:
    bootstrap = start_dht("bootstrap")
    failures: list[str] = []

    peer = start_dht("peer", DEAD, bootstrap.addresses()[0], on_retry=failures.append)

    assert failures == []
    bootstrap.store("key", None, b"value", ttl=A_MINUTE)
    assert peer.get("key")[None][0] == b"value"


def test_only_dead_addresses_are_an_error_in_time_that_leaves_nothing(
    start_dht: StartDHT, temporary_folder: Path
) -> None:
    failures: list[str] = []
    before = time.monotonic()

    with pytest.raises(JoinError, match=r"127\.0\.0\.1/tcp/1/.*: connection refused"):
        start_dht("peer", DEAD, on_retry=failures.append, join_timeout=Seconds(5.0))

    assert time.monotonic() - before < 8.0
    assert failures
    assert all("connection refused; trying again in" in line for line in failures)
    assert children() == []
    assert list(temporary_folder.iterdir()) == []


def test_a_wrong_peer_id_is_named_as_the_reason(start_dht: StartDHT) -> None:
    bootstrap = start_dht("bootstrap")
    other_id = DEAD.rpartition("/")[2]
    wrong = bootstrap.addresses()[0].replace(bootstrap.peer_id, other_id)

    with pytest.raises(JoinError, match="another peer id answers there"):
        start_dht("peer", wrong, join_timeout=Seconds(1.0))


def test_a_host_name_that_does_not_exist_is_named_as_the_reason(start_dht: StartDHT) -> None:
    wrong = DEAD.replace("/ip4/127.0.0.1", "/dns4/nowhere.invalid")

    with pytest.raises(JoinError, match="the host name is not known"):
        start_dht("peer", wrong, join_timeout=Seconds(1.0))


def test_a_bootstrap_that_comes_later_is_joined(start_dht: StartDHT, tmp_path: Path) -> None:
    port = free_port()
    identity = load_or_create_identity(tmp_path / "late.key")
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
    failures: list[str] = []

    def on_retry(line: str) -> None:
        failures.append(line)
        if len(failures) == 2:
            start_dht("late", port=port)

    peer = start_dht("peer", address, on_retry=on_retry)

    assert len(failures) == 2
    peer.check()


def test_a_peer_does_not_join_itself(start_dht: StartDHT, tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "peer.key")
    own = f"/ip4/127.0.0.1/tcp/31337/p2p/{identity.peer_id}"

    with pytest.raises(ConfigError, match="is this peer itself"):
        start_dht("peer", own)


def test_a_port_that_is_taken_is_refused(start_dht: StartDHT) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"--network\.port: .*{port}: Address already in"):
            start_dht("peer", port=port)


def test_a_port_that_another_peer_has_is_refused(start_dht: StartDHT) -> None:
    port = free_port()
    start_dht("first", port=port)

    with pytest.raises(ConfigError, match=r"--network\.port: "):
        start_dht("second", port=port)


def test_a_p2pd_of_another_platform_is_refused(start_dht: StartDHT, tmp_path: Path) -> None:
    binary = tmp_path / "p2pd"
    binary.write_bytes(b"\x7fELF" + bytes(60))
    binary.chmod(0o755)

    with pytest.raises(ConfigError, match=r"p2pd cannot run: .*Exec format error"):
        start_dht("peer", binary=binary)


def test_a_p2pd_that_may_not_be_executed_is_refused(start_dht: StartDHT, tmp_path: Path) -> None:
    binary = tmp_path / "p2pd"
    binary.write_bytes(b"")
    binary.chmod(0o644)

    with pytest.raises(ConfigError, match=r"p2pd cannot run: .*Permission denied"):
        start_dht("peer", binary=binary)


def test_a_p2pd_that_gives_up_is_quoted(start_dht: StartDHT, tmp_path: Path) -> None:
    binary = tmp_path / "p2pd"
    binary.write_text("#!/bin/sh\necho oh no\nexit 1\n")
    binary.chmod(0o755)

    with pytest.raises(ConfigError, match="p2pd cannot run: oh no"):
        start_dht("peer", binary=binary)


def test_a_p2pd_that_never_gets_ready_is_ended(
    start_dht: StartDHT, tmp_path: Path, temporary_folder: Path
) -> None:
    binary = tmp_path / "p2pd"
    binary.write_text("#!/bin/sh\ntrap '' TERM\necho thinking\nexec sleep 600\n")
    binary.chmod(0o755)

    with pytest.raises(SwarmLostError, match=r"not ready within 0\.5 s \(thinking\)"):
        start_dht("peer", binary=binary, startup_timeout=Seconds(0.5))

    assert children() == []
    assert list(temporary_folder.iterdir()) == []


def test_every_error_is_one_line(start_dht: StartDHT) -> None:
    with pytest.raises(OpenDiLoCoError) as caught:
        start_dht("peer", "hello")

    assert "\n" not in str(caught.value)
