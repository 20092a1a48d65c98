"""One host of the baseline: the bytes of a round by plain TCP, to and from all others at once.

Started as ``python -m tests.benchmarks.plain_tcp SETTINGS``; the orders are ``listen``,
``connect`` and ``round``. Connections are opened once and used in both directions.
"""

import json
import socket
import sys
import threading
import time
from dataclasses import dataclass

from tests.benchmarks.orders import Answer, obey

_CHUNK_BYTES = 1 << 20
_PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """What a host is told on its command line.

    Attributes:
        address: Where it listens.
        index: Its number; it dials all that have a greater one.
        num_hosts: How many there are.
        streams: Connections per pair of hosts.
    """

    address: str
    index: int
    num_hosts: int
    streams: int


class TcpHost:
    """Its connections."""

    def __init__(self, settings: TcpSettings) -> None:
        self._settings = settings
        self._server = socket.create_server((settings.address, 0), backlog=64)
        self._server.settimeout(_PATIENCE)
        self._connections: list[socket.socket] = []

    def listen(self) -> Answer:
        """Say where it listens."""
        return {"port": self._server.getsockname()[1]}

    def connect(self, hosts: list[tuple[str, int]]) -> Answer:
        """Open the connections to all hosts after this one, and take those of all before it."""
        index, streams = self._settings.index, self._settings.streams
        for address, port in hosts[index + 1 :]:
            self._connections += [
                socket.create_connection((address, port), timeout=_PATIENCE) for _ in range(streams)
            ]
        for _ in range(index * streams):
            connection, _ = self._server.accept()
            connection.settimeout(_PATIENCE)
            self._connections.append(connection)
        return {}

    def round(self, num_bytes: int) -> Answer:
        """Send so many bytes in all, the same to everybody, and receive as many.

        Returns:
            ``seconds`` until everything was sent and received.
        """
        share = -(-num_bytes // len(self._connections))
        began_at = time.monotonic()
        threads = [
            threading.Thread(target=target, args=(connection, share))
            for connection in self._connections
            for target in (_send, _receive)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"seconds": time.monotonic() - began_at}


def _send(connection: socket.socket, num_bytes: int) -> None:
    chunk = memoryview(bytes(_CHUNK_BYTES))
    while num_bytes:
        size = min(num_bytes, _CHUNK_BYTES)
        connection.sendall(chunk[:size])
        num_bytes -= size


def _receive(connection: socket.socket, num_bytes: int) -> None:
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    while num_bytes:
        received = connection.recv_into(chunk[: min(num_bytes, _CHUNK_BYTES)])
        if not received:
            raise ConnectionError("the other host has ended")
        num_bytes -= received


def main() -> None:
    """Carry out orders until there are no more."""
    host = TcpHost(TcpSettings(**json.loads(sys.argv[1])))
    obey({"listen": host.listen, "connect": host.connect, "round": host.round})


if __name__ == "__main__":
    main()
