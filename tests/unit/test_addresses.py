import pytest
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from opendiloco.addresses import (
    best_first,
    complete_announced,
    dial_part_of,
    is_public,
    parse_multiaddr,
    peer_id_of,
)
from opendiloco.errors import ConfigError

RSA_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ED25519_ID = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


@pytest.mark.parametrize(
    "address",
    [
        f"/ip4/203.0.113.7/tcp/31337/p2p/{RSA_ID}",
        f"/ip4/10.0.0.1/tcp/1/p2p/{ED25519_ID}",
        f"/ip6/2001:db8::1/tcp/65535/p2p/{RSA_ID}",
        f"/dns/seed.example.org/tcp/31337/p2p/{RSA_ID}",
        f"/dns4/localhost/tcp/31337/p2p/{RSA_ID}",
        f"/dns6/my-container-1/tcp/31337/p2p/{RSA_ID}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{RSA_ID}/p2p-circuit/p2p/{ED25519_ID}",
    ],
)
def test_an_accepted_address_is_one_for_hivemind_too(address: str) -> None:
    parsed = parse_multiaddr(f" {address}\n")

    assert str(Multiaddr(parsed)) == address
    assert PeerID.from_base58(peer_id_of(parsed)).to_base58() == address.rsplit("/", 1)[1]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "it is empty"),
        ("hello", "it must begin with /"),
        ("/", "/ is none of /ip4"),
        (f"/p2p/{RSA_ID}", "is none of /ip4"),
        (f"/ip/1.2.3.4/tcp/1/p2p/{RSA_ID}", "/ip is none of /ip4"),
        (f"/ip4/ 1.2.3.4/tcp/1/p2p/{RSA_ID}", "space or comma"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{RSA_ID},/ip4/1.2.3.5/tcp/1/p2p/{RSA_ID}", "space or comma"),
        (f"/ip4/1.2.3/tcp/1/p2p/{RSA_ID}", "'1.2.3' is no IP address"),
        (f"/ip4/example.org/tcp/1/p2p/{RSA_ID}", "'example.org' is no IP address"),
        (f"/ip4/::1/tcp/1/p2p/{RSA_ID}", "::1 belongs after /ip6"),
        (f"/ip4/0.0.0.0/tcp/1/p2p/{RSA_ID}", "0.0.0.0 is no address that others can dial"),
        (f"/dns/my_container/tcp/1/p2p/{RSA_ID}", "'my_container' is no host name"),
        (f"/dns/-a/tcp/1/p2p/{RSA_ID}", "'-a' is no host name"),
        (f"/ip4/1.2.3.4/udp/1/p2p/{RSA_ID}", "/tcp/PORT"),
        (f"/ip4/1.2.3.4/p2p/{RSA_ID}", "/tcp/PORT"),
        (f"/ip4/1.2.3.4/tcp/0/p2p/{RSA_ID}", "'0' is no port"),
        (f"/ip4/1.2.3.4/tcp/65536/p2p/{RSA_ID}", "'65536' is no port"),
        (f"/ip4/1.2.3.4/tcp/http/p2p/{RSA_ID}", "'http' is no port"),
        (f"/ip4/1.2.3.4/tcp/1/ws/p2p/{RSA_ID}", "/ws is not understood"),
        ("/ip4/1.2.3.4/tcp/1", "must end in /p2p/"),
        ("/ip4/1.2.3.4/tcp/1/p2p/", "'' is no peer id"),
        ("/ip4/1.2.3.4/tcp/1/p2p/X", "'X' is no peer id"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{RSA_ID[:-1]}", "is no peer id"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{RSA_ID[:-1]}0", "is no peer id"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{RSA_ID}/", "is no peer id"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{RSA_ID}/p2p/{RSA_ID}", "p2p-circuit"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{RSA_ID}/p2p-circuit", "is no peer id"),
    ],
)
def test_a_wrong_address_is_refused_with_one_line_that_says_why(address: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_multiaddr(address)

    assert reason in str(caught.value)
    assert str(caught.value).startswith("--initial-peers: ")
    assert "an address looks like /ip4/203.0.113.7/tcp/31337/p2p/Qm" in str(caught.value)


def test_the_part_to_dial_of_a_relayed_address_leads_over_the_relay() -> None:
    relayed = f"/ip4/203.0.113.7/tcp/1/p2p/{RSA_ID}/p2p-circuit/p2p/{ED25519_ID}"

    assert dial_part_of(relayed) == f"/ip4/203.0.113.7/tcp/1/p2p/{RSA_ID}/p2p-circuit"


@pytest.mark.parametrize(
    ("entry", "address"),
    [
        ("203.0.113.7", "/ip4/203.0.113.7/tcp/31337"),
        (" 203.0.113.7 ", "/ip4/203.0.113.7/tcp/31337"),
        ("2001:db8::1", "/ip6/2001:db8::1/tcp/31337"),
        ("seed.example.org", "/dns/seed.example.org/tcp/31337"),
        ("/ip4/203.0.113.7/tcp/40001", "/ip4/203.0.113.7/tcp/40001"),
        (f"/ip4/203.0.113.7/tcp/40001/p2p/{RSA_ID}", "/ip4/203.0.113.7/tcp/40001"),
    ],
)
def test_an_announced_address_is_completed(entry: str, address: str) -> None:
    assert complete_announced(entry, port=31337, prefix="--network.") == address


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("/ip4/1.2.3.4/tcp/0", "'0' is no port"),
        ("::", "no address that others can dial"),
        ("203.0.113.7:31337", "is no host name"),
        ("", "is no host name"),
        ("http://example.org", "is no host name"),
        ("/ip4/1.2.3.4", "/tcp/PORT"),
    ],
)
def test_a_wrong_announced_address_is_refused(entry: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        complete_announced(entry, port=31337, prefix="--network.")

    assert str(caught.value).startswith("--network.announce: ")
    assert reason in str(caught.value)


def test_an_announced_host_needs_a_fixed_port() -> None:
    with pytest.raises(ConfigError, match=r"--network\.announce: .*; set --network\.port"):
        complete_announced("203.0.113.7", port=0, prefix="--network.")


def test_an_announced_multiaddress_needs_no_fixed_port() -> None:
    address = complete_announced("/ip4/203.0.113.7/tcp/40001", port=0, prefix="--network.")

    assert address == "/ip4/203.0.113.7/tcp/40001"


LOOPBACK = "/ip4/127.0.0.1/tcp/1"
PRIVATE = "/ip4/192.168.1.2/tcp/1"
PRIVATE_6 = "/ip6/fd00::2/tcp/1"
PUBLIC = "/ip4/8.8.8.8/tcp/1"
PUBLIC_6 = "/ip6/2606:4700::1/tcp/1"
RELAYED = f"/ip4/8.8.4.4/tcp/1/p2p/{RSA_ID}/p2p-circuit"


def test_addresses_that_reach_further_come_first() -> None:
    known = [LOOPBACK, RELAYED, PRIVATE_6, PRIVATE, PUBLIC_6, PUBLIC]

    ordered = best_first(known)

    assert ordered == [PUBLIC, PUBLIC_6, PRIVATE, PRIVATE_6, RELAYED]


def test_announced_addresses_come_before_public_ones() -> None:
    assert best_first([PUBLIC, PRIVATE], announced=[PRIVATE]) == [PRIVATE, PUBLIC]


def test_a_peer_that_only_this_machine_reaches_says_so() -> None:
    assert best_first([LOOPBACK]) == [LOOPBACK]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (PUBLIC, True),
        (PUBLIC_6, True),
        ("/dns/seed.example.org/tcp/1", True),
        (PRIVATE, False),
        (LOOPBACK, False),
        ("/dns/localhost/tcp/1", False),
        ("/ip4/100.64.0.1/tcp/1", False),
    ],
)
def test_only_what_the_internet_routes_is_public(address: str, *, public: bool) -> None:
    assert is_public(address) is public
