"""Multiaddresses: checking what people typed, completing it, and sorting what to show them."""

import contextlib
import ipaddress
import re
from collections.abc import Sequence

import base58

from opendiloco.errors import ConfigError

EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

_HOST_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")
_LABEL = r"(?!..--)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_MULTIHASHES = (b"\x12\x20", b"\x00\x24", b"\x00\x25")
"""SHA-256 of an RSA key, and the two short kinds of key that are their own peer id."""


def parse_multiaddr(text: str, *, option: str = "--initial-peers") -> str:
    """Return the multiaddress of a peer as libp2p understands it, whitespace around it removed.

    Accepted are `/HOST/tcp/PORT/p2p/PEERID`, with a HOST of `ip4/1.2.3.4`, `ip6/::1`,
    `dns/NAME`, `dns4/NAME` or `dns6/NAME`, and that followed by `/p2p-circuit/p2p/PEERID` for a
    peer behind a relay.

    Args:
        text: What the user gave.
        option: The setting that it came from, for the message.

    Raises:
        ConfigError: If it is anything else; the message says what is wrong and shows an example.
    """
    text = text.strip()
    try:
        _check(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r}: {error}; an address looks like {EXAMPLE}") from None
    return text


def peer_id_of(address: str) -> str:
    """Return the peer id, in base58, that a checked multiaddress leads to."""
    return address.rpartition("/p2p/")[2]


def dial_part_of(address: str) -> str:
    """Return a checked multiaddress without its final peer id."""
    return address.rpartition("/p2p/")[0]


def complete_announced(entry: str, *, port: int, prefix: str) -> str:
    """Return the multiaddress to announce, without a peer id.

    Args:
        entry: An IP address or a host name, to be completed with `port`, or a multiaddress.
        port: The TCP port that the peer listens on; 0 when any free one will do.
        prefix: What the options `announce` and `port` are called before these words.

    Raises:
        ConfigError: If it is neither, or the port that others should dial is not known.
    """
    entry = entry.strip()
    try:
        if entry.startswith("/"):
            transport = entry.partition("/p2p/")[0]
            _check_transport(transport.split("/")[1:])
            return transport
        host = _announced_host(entry)
    except ValueError as error:
        raise ConfigError(
            f"{prefix}announce: {entry!r}: {error}; "
            "give an IP address, a host name or a multiaddress such as /ip4/203.0.113.7/tcp/31337"
        ) from None
    if port == 0:
        raise ConfigError(
            f"{prefix}announce: {entry} needs a fixed port to announce; set {prefix}port"
        )
    return f"/{host}/tcp/{port}"


def best_first(addresses: Sequence[str], *, announced: Sequence[str] = ()) -> list[str]:
    """Return listening addresses in the order in which others should try them.

    Announced ones come first, then public, private and relayed ones; those that only work on
    this machine last, and only when there is no other.

    Args:
        addresses: Multiaddresses without the final peer id, as p2pd reports them.
        announced: Those of them that the user chose.
    """
    unique = dict.fromkeys([*announced, *addresses])
    ranks = {address: -1 if address in announced else _rank(address) for address in unique}
    ordered = sorted(unique, key=lambda address: ranks[address])
    elsewhere = [address for address in ordered if ranks[address] < _LOOPBACK_RANK]
    return elsewhere or ordered


def is_public(address: str) -> bool:
    """Return whether peers anywhere on the internet may be able to dial this address."""
    return _rank(address) < _PRIVATE_RANK


_PRIVATE_RANK = 2
_RELAYED_RANK = 4
_LOOPBACK_RANK = 6


def _rank(address: str) -> int:
    """Return how good an address is, less is better; IPv4 goes before IPv6."""
    _, kind, host, *_ = address.split("/")
    if "/p2p-circuit" in address:
        return _RELAYED_RANK
    if kind not in {"ip4", "ip6"}:
        return _LOOPBACK_RANK if host == "localhost" else 0
    ip = ipaddress.ip_address(host)
    rank = 0 if ip.is_global else _PRIVATE_RANK
    if ip.is_loopback:
        rank = _LOOPBACK_RANK
    return rank + (ip.version == 6)


def _check(text: str) -> None:
    """Raise ValueError, with the reason, unless this is the multiaddress of a peer."""
    if not text.startswith("/"):
        raise ValueError("it must begin with /" if text else "it is empty")
    if re.search(r"[\s,]", text):
        raise ValueError("there is a space or comma inside")
    transport, *peers = text.split("/p2p/")
    if len(peers) == 2 and peers[0].endswith("/p2p-circuit"):
        peers[0] = peers[0].removesuffix("/p2p-circuit")
    elif len(peers) > 1:
        raise ValueError("two peer ids need /p2p-circuit between them")
    _check_transport(transport.split("/")[1:])
    if not peers:
        raise ValueError("it must end in /p2p/ and the peer id")
    for peer_id in peers:
        _check_peer_id(peer_id)


def _check_transport(parts: Sequence[str]) -> None:
    kind = parts[0] if parts else ""
    if kind not in _HOST_KINDS:
        raise ValueError(f"/{kind} is none of {', '.join('/' + known for known in _HOST_KINDS)}")
    if len(parts) < 4 or parts[2] != "tcp":
        raise ValueError(f"/{kind}/HOST must be followed by /tcp/PORT")
    if len(parts) > 4:
        raise ValueError(f"/{parts[4]} is not understood after the port")
    _check_host(kind, parts[1])
    if not (parts[3].isascii() and parts[3].isdigit() and 1 <= int(parts[3]) <= 65535):
        raise ValueError(f"{parts[3]!r} is no port; ports are 1 to 65535")


def _check_host(kind: str, host: str) -> None:
    if kind.startswith("dns"):
        if not _HOST_NAME.fullmatch(host):
            raise ValueError(f"{host!r} is no host name")
        return
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{host!r} is no IP address") from None
    if kind != f"ip{ip.version}":
        raise ValueError(f"{host} belongs after /ip{ip.version}")
    if ip.is_unspecified:
        raise ValueError(f"{host} is no address that others can dial")


def _check_peer_id(peer_id: str) -> None:
    decoded = b""
    with contextlib.suppress(ValueError):
        decoded = base58.b58decode(peer_id)
    if decoded[:2] not in _MULTIHASHES or len(decoded) != 2 + decoded[1]:
        raise ValueError(f"{peer_id!r} is no peer id; one looks like {peer_id_of(EXAMPLE)}")


def _announced_host(entry: str) -> str:
    try:
        host = f"ip{ipaddress.ip_address(entry).version}/{entry}"
    except ValueError:
        host = f"dns/{entry}"
    _check_host(*host.split("/", 1))
    return host
