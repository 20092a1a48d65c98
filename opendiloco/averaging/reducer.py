"""Sums the parts that this member averages for all: in threads, in float64."""

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from opendiloco.averaging.codecs import Codec, Payload
from opendiloco.outer import LARGEST_CHANGE
from opendiloco.state import slice_bytes


class SenselessPartError(Exception):
    """A part that another member sent cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class AveragedPart:
    """A finished part, as all members get it.

    Attributes:
        payload: The encoded average.
        values: What it decodes to, flat float32.
        contributors: Members whose data is in it.
    """

    payload: Payload
    values: torch.Tensor
    contributors: frozenset[int]


@dataclass(slots=True)
class _Sum:
    """Of one part; float64, so that the order of arrival does not matter in float32."""

    total: torch.Tensor
    weight: float = 0.0
    contributors: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class PartReducer:
    """Weighted sums of parts. Safe to use from several threads."""

    def __init__(self, codec: Codec, weights: Mapping[int, float]) -> None:
        """Start with nothing.

        Args:
            codec: How parts travel.
            weights: Weight of every member that may contribute.
        """
        self._codec = codec
        self._weights = weights
        self._sums: dict[int, _Sum] = {}
        self._lock = threading.Lock()

    def add(self, part: int, num_elements: int, member: int, payload: Payload) -> None:
        """Add what a member sent for a part.

        Raises:
            SenselessPartError: If it is no part, or has values that are absurd.
        """
        values = torch.empty(num_elements)
        decode_checked(self._codec, payload, values)
        self.add_values(part, member, values)

    def add_values(self, part: int, member: int, values: torch.Tensor) -> None:
        """Add a member's float32 values; a second time does nothing."""
        with self._lock:
            this = self._sums.get(part)
            if this is None:
                this = self._sums[part] = _Sum(torch.zeros(len(values), dtype=torch.float64))
        with this.lock:
            if member in this.contributors:
                return
            this.total.add_(values, alpha=self._weights[member])
            this.weight += self._weights[member]
            this.contributors.add(member)

    def finish(self, part: int) -> AveragedPart:
        """Return the average of what was added, and forget the sum."""
        with self._lock:
            this = self._sums.pop(part)
        mean = this.total.div_(this.weight).float()
        payload = self._codec.encode(mean).payload
        self._codec.decode_(payload, mean)
        return AveragedPart(payload, mean, frozenset(this.contributors))

    def forget(self) -> None:
        """Drop every sum: their parts are averaged anew."""
        with self._lock:
            self._sums.clear()


def decode_checked(codec: Codec, payload: Payload, out: torch.Tensor) -> None:
    """Decode what another peer sent.

    Raises:
        SenselessPartError: If it has the wrong size, or values that are absurd.
    """
    try:
        codec.decode_(payload, out)
    except ValueError as error:
        raise SenselessPartError(f"sent a part that makes no sense: {error}") from None
    low, high = torch.aminmax(out)
    # Written so that NaN, which is neither more nor less, is caught as well.
    if not (low >= -LARGEST_CHANGE and high <= LARGEST_CHANGE):
        raise SenselessPartError("sent values that are not finite or absurdly large")


def part_digest(values: torch.Tensor, contributors: int) -> bytes:
    """Return SHA-256 of a part's float32 bytes and of whose data is in it, as a bit set."""
    digest = hashlib.sha256(f"{contributors:x}\n".encode())
    digest.update(slice_bytes(values))
    return digest.digest()
