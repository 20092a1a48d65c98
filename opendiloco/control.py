"""Questions to a running p2pd over its control socket, each answered in bounded time."""

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from opendiloco.addresses import dial_part_of
from opendiloco.errors import SwarmLostError
from opendiloco.units import Seconds

NO_ANSWER = "no answer"

_LATE_PEERS = Seconds(2.0)
"""How long the others still have to answer once one peer is connected."""

# What libp2p says, and what we say; the first that occurs counts.
_REASONS = {
    "peer id mismatch": "another peer id answers there",
    "connection refused": "connection refused",
    "no route to host": "no route to that host",
    "network is unreachable": "the network is unreachable",
    "no good addresses": "the host name is not known",
    "no such host": "the host name is not known",
    "timeout": NO_ANSWER,
    "deadline exceeded": NO_ANSWER,
    "NO_RESERVATION": "the relay does not know that peer",
}


class _Call:
    """One request on its own connection, and what came back of the response so far."""

    def __init__(self, socket_path: Path, request: p2pd_pb2.Request, *, timeout: Seconds) -> None:
        self._received = b""
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(timeout)
        body = request.SerializeToString()
        try:
            self.connection.connect(str(socket_path))
            self.connection.sendall(_varint(len(body)) + body)
        except OSError:
            self.connection.close()
            raise

    def receive(self) -> p2pd_pb2.Response | None:
        """Read what is there; return the response once it is complete.

        Raises:
            OSError: If p2pd hung up or sent nothing within the timeout.
        """
        chunk = self.connection.recv(65536)
        if not chunk:
            raise ConnectionResetError("p2pd hung up")
        self._received += chunk
        length, start = _read_varint(self._received)
        if start == 0 or len(self._received) < start + length:
            return None
        return p2pd_pb2.Response.FromString(self._received[start : start + length])


def visible_addresses(socket_path: Path, *, timeout: Seconds) -> list[str]:
    """Return the multiaddresses, without peer id, by which p2pd believes to be reachable.

    Raises:
        SwarmLostError: If p2pd does not answer.
    """
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)
    response = _ask(socket_path, request, timeout=timeout)
    return [str(Multiaddr(address)) for address in response.identify.addrs]


def connect_all(
    socket_path: Path, peers: Mapping[str, Sequence[str]], *, timeout: Seconds
) -> dict[str, str | None]:
    """Have p2pd connect to several peers at once.

    Args:
        socket_path: p2pd's control socket.
        peers: For each peer id its multiaddresses.
        timeout: For all together; shorter once one of them is connected.

    Returns:
        For each peer id None when it is connected, else why not, in a few words.

    Raises:
        SwarmLostError: If p2pd does not take the requests.
    """
    outcomes: dict[str, str | None] = dict.fromkeys(peers, NO_ANSWER)
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for peer_id, addresses in peers.items():
            try:
                call = _Call(socket_path, _connect_request(peer_id, addresses), timeout=timeout)
            except OSError as error:
                raise SwarmLostError(f"p2pd does not answer: {error}") from None
            stack.enter_context(call.connection)
            selector.register(call.connection, selectors.EVENT_READ, (peer_id, call))
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                peer_id, call = key.data
                done, outcomes[peer_id] = _outcome(call)
                if done:
                    selector.unregister(call.connection)
            if None in outcomes.values():
                deadline = min(deadline, time.monotonic() + _LATE_PEERS)
    return outcomes


def find_peers(
    socket_path: Path, peer_ids: Sequence[str], *, timeout: Seconds
) -> dict[str, list[str]]:
    """Return under which addresses, without peer id, peers that p2pd is connected to listen.

    Args:
        socket_path: p2pd's control socket.
        peer_ids: Whom to look for; those that p2pd does not know are left out.
        timeout: For each.

    Raises:
        SwarmLostError: If p2pd does not answer.
    """
    found = {}
    for peer_id in peer_ids:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.DHT,
            dht=p2pd_pb2.DHTRequest(
                type=p2pd_pb2.DHTRequest.FIND_PEER, peer=PeerID.from_base58(peer_id).to_bytes()
            ),
        )
        response = _ask(socket_path, request, timeout=timeout)
        addresses = [str(Multiaddr(address)) for address in response.dht.peer.addrs]
        if addresses:
            found[peer_id] = addresses
    return found


def _ask(socket_path: Path, request: p2pd_pb2.Request, *, timeout: Seconds) -> p2pd_pb2.Response:
    response = None
    try:
        call = _Call(socket_path, request, timeout=timeout)
        with call.connection:
            while response is None:
                response = call.receive()
    except OSError as error:
        raise SwarmLostError(f"p2pd does not answer: {error}") from None
    return response


def _connect_request(peer_id: str, addresses: Sequence[str]) -> p2pd_pb2.Request:
    return p2pd_pb2.Request(
        type=p2pd_pb2.Request.CONNECT,
        connect=p2pd_pb2.ConnectRequest(
            peer=PeerID.from_base58(peer_id).to_bytes(),
            addrs=[Multiaddr(dial_part_of(address)).to_bytes() for address in addresses],
        ),
    )


def _outcome(call: _Call) -> tuple[bool, str | None]:
    """Return whether the call is over, and why it failed if it did."""
    try:
        response = call.receive()
    except OSError as error:
        return True, str(error)
    if response is None:
        return False, NO_ANSWER
    if response.type == p2pd_pb2.Response.OK:
        return True, None
    return True, _reason(response.error.msg)


def _reason(message: str) -> str:
    for symptom, reason in _REASONS.items():
        if symptom in message:
            return reason
    return message.splitlines()[-1].strip()[:120] if message.strip() else NO_ANSWER


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _read_varint(encoded: bytes) -> tuple[int, int]:
    """Return a number and where it ends; (0, 0) when it is not complete."""
    number = 0
    for position, byte in enumerate(encoded[:10]):
        number |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return number, position + 1
    return 0, 0
