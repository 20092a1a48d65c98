"""The hosts that a benchmark's processes run on: all this machine, or on an emulated WAN."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.wan.emulation import Wan, WanHost

_DELAYS_PER_ROUND_TRIP = 4  # out of one host and into the other, there and back


@dataclass(frozen=True, slots=True)
class Place:
    """One host.

    Attributes:
        address: Where it listens.
        launcher: Words that, in front of a command, run it there.
    """

    address: str
    launcher: tuple[str, ...] = ()


@contextmanager
def places(network: str, count: int, *, rtt_ms: float, rate_mbit: float) -> Iterator[list[Place]]:
    """Provide hosts until the block is left; what runs on them must have ended by then.

    Args:
        network: ``loopback`` or ``wan``.
        count: How many.
        rtt_ms: Of the WAN, between any two hosts.
        rate_mbit: Of the WAN, of every host in each direction, in Mbit/s.
    """
    if network == "loopback":
        yield [Place("127.0.0.1")] * count
        return
    host = WanHost(up=rate_mbit, down=rate_mbit, delay_ms=rtt_ms / _DELAYS_PER_ROUND_TRIP)
    with Wan([host] * count) as wan:
        yield [Place(address, wan.launcher(i)) for i, address in enumerate(wan.addresses)]
