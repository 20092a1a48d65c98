"""What tests of the network side share."""

import socket
from collections.abc import Callable

import psutil

from opendiloco.dht import SwarmDHT
from opendiloco.units import Seconds

StartDHT = Callable[..., SwarmDHT]
"""`start_dht("name", address, ..., option=value)` of tests/swarm/conftest.py."""

DEAD = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
"""An address at which nobody is."""

A_MINUTE = Seconds(60.0)


def free_port() -> int:
    """Return a TCP port on loopback that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def children() -> list[psutil.Process]:
    """Return this process's children, without torch's helper, which stays with its parent."""
    tree = psutil.Process().children(recursive=True)
    return [child for child in tree if child.name() != "torch_shm_manager"]
