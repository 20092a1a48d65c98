import threading
from pathlib import Path

import pytest

from opendiloco.dht import MAX_VALUE_BYTES
from opendiloco.units import Seconds, now
from tests.support.network import A_MINUTE, StartDHT, free_port
from tests.support.strangers import store_garbage
from tests.support.swarm import nodes, wait_until

pytestmark = pytest.mark.swarm


def test_a_value_travels_between_peers_that_know_only_the_bootstrap(start_dht: StartDHT) -> None:
    bootstrap = start_dht("bootstrap")
    writer = start_dht("writer", bootstrap.addresses()[0])
    reader = start_dht("reader", bootstrap.addresses()[0])

    stored = writer.store("key", writer.owner_subkey, b"value", ttl=A_MINUTE)

    assert stored
    assert reader.get("key")[writer.owner_subkey][0] == b"value"


def test_the_peers_of_a_swarm_go_on_without_the_bootstrap(start_dht: StartDHT) -> None:
    bootstrap = start_dht("bootstrap")
    writer = start_dht("writer", bootstrap.addresses()[0])
    reader = start_dht("reader", bootstrap.addresses()[0])
    bootstrap.close()

    writer.store("key", writer.owner_subkey, b"value", ttl=A_MINUTE)

    assert reader.get("key")[writer.owner_subkey][0] == b"value"


def test_a_peer_in_client_mode_reads_and_writes(start_dht: StartDHT) -> None:
    bootstrap = start_dht("bootstrap")
    client = start_dht("client", bootstrap.addresses()[0], client_mode=True)

    stored = client.store("key", client.owner_subkey, b"value", ttl=A_MINUTE)

    assert stored
    assert bootstrap.get("key")[client.owner_subkey][0] == b"value"
    assert client.get("key")[client.owner_subkey][0] == b"value"


def test_a_key_without_subkeys_has_one_value(start_dht: StartDHT) -> None:
    peer = start_dht("peer")

    peer.store("key", None, b"value", ttl=A_MINUTE)

    assert peer.get("key")[None][0] == b"value"


def test_a_key_that_nobody_wrote_is_empty(start_dht: StartDHT) -> None:
    assert start_dht("peer").get("key") == {}


def test_values_live_only_as_long_as_they_were_stored_for(start_dht: StartDHT) -> None:
    bootstrap = start_dht("bootstrap")
    writer = start_dht("writer", bootstrap.addresses()[0])
    written_at = now()

    writer.store("key", "subkey", b"value", ttl=Seconds(2.0))

    value, expires_at = bootstrap.get("key")["subkey"]
    assert value == b"value"
    assert written_at + 2.0 <= expires_at <= written_at + 3.0
    wait_until(lambda: bootstrap.get("key") == {}, "the value is forgotten", within=6.0)


def test_nobody_else_can_write_under_an_owners_subkey(start_dht: StartDHT) -> None:
    owner = start_dht("owner")
    thief = start_dht("thief", owner.addresses()[0])
    owner.store("key", owner.owner_subkey, b"mine", ttl=A_MINUTE)

    stored = thief.store("key", owner.owner_subkey, b"stolen", ttl=Seconds(120.0))

    assert not stored
    assert owner.get("key")[owner.owner_subkey][0] == b"mine"
    assert thief.get("key")[owner.owner_subkey][0] == b"mine"


def test_a_strangers_unreadable_value_does_not_blind_the_others(start_dht: StartDHT) -> None:
    peer = start_dht("peer")
    stranger = start_dht("stranger", peer.addresses()[0])
    peer.store("key", peer.owner_subkey, b"value", ttl=A_MINUTE)

    accepted = store_garbage(stranger, key="key")

    assert accepted == [False]
    assert peer.get("key")[peer.owner_subkey][0] == b"value"


def test_values_that_the_pipe_would_lose_are_refused(start_dht: StartDHT) -> None:
    peer = start_dht("peer")

    with pytest.raises(ValueError, match="the DHT takes 4096"):
        peer.store("key", None, bytes(MAX_VALUE_BYTES + 1), ttl=A_MINUTE)


def test_the_largest_allowed_values_arrive_from_many_threads(start_dht: StartDHT) -> None:
    peer = start_dht("peer")
    stored = []

    def write(number: int) -> None:
        value = bytes(MAX_VALUE_BYTES)
        stored.append(peer.store(f"key {number}", None, value, ttl=A_MINUTE))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert stored == [True] * 6


def test_announced_addresses_are_what_others_get(start_dht: StartDHT) -> None:
    port = free_port()

    peer = start_dht("peer", port=port, announce=("seed.example.org", "203.0.113.7"))

    assert peer.addresses() == [
        f"/dns/seed.example.org/tcp/{port}/p2p/{peer.peer_id}",
        f"/ip4/203.0.113.7/tcp/{port}/p2p/{peer.peer_id}",
    ]


def test_a_peer_that_was_met_is_there_though_news_of_it_are_late(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (here, there):
        there.tracker.pause()
        wait_until(lambda: not here.tracker.view().peers, "the other one counts as gone")

        here.tracker.met(["nobody", there.peer_id])

        assert [peer.peer_id for peer in here.tracker.view().peers] == [there.peer_id]
