"""Sums the parts that this member averages for all: in threads, in float64."""

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from opendiloco.averaging.codecs import Codec, Payload
from opendiloco.outer import is_sound

_PER_THREAD = threading.local()  # new memory for every part would cost page faults


class SenselessPartError(Exception):
    """A part that another member sent cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class AveragedPart:
    """A finished part, as all members get it.

    Attributes:
        payload: The encoded average.
        values: What it decodes to, flat float32; this thread's :func:`scratch`.
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
        self._spare: list[torch.Tensor] = []  # totals of finished parts, to be used again

    def add(self, part: int, num_elements: int, member: int, payload: Payload) -> None:
        """Add what a member sent for a part.

        Raises:
            SenselessPartError: If it is no part, or has values that are absurd.
        """
        values = scratch(num_elements)
        decode_checked(self._codec, payload, values)
        self.add_values(part, member, values)

    def add_values(self, part: int, member: int, values: torch.Tensor) -> None:
        """Add a member's float32 values; a second time does nothing."""
        with self._lock:
            this = self._sums.get(part)
            if this is None:
                this = self._sums[part] = _Sum(self._empty_total(len(values)))
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
        mean = scratch(len(this.total)).copy_(this.total.div_(this.weight))
        with self._lock:
            self._spare.append(this.total)
        payload = self._codec.encode(mean).payload
        self._codec.decode_(payload, mean)
        return AveragedPart(payload, mean, frozenset(this.contributors))

    def _empty_total(self, num_elements: int) -> torch.Tensor:
        if self._spare and len(self._spare[-1]) == num_elements:
            return self._spare.pop().zero_()
        return torch.zeros(num_elements, dtype=torch.float64)

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
    if not is_sound(out):
        raise SenselessPartError("sent values that are not finite or absurdly large")


def part_digest(payload: Payload, contributors: int) -> bytes:
    """Return SHA-256 of a part's encoded average and of whose data is in it, as a bit set."""
    digest = hashlib.sha256(f"{contributors:x}\n".encode())
    digest.update(payload)
    return digest.digest()


def scratch(num_elements: int) -> torch.Tensor:
    """Return float32 memory that belongs to this thread until it asks again."""
    kept: torch.Tensor | None = getattr(_PER_THREAD, "kept", None)
    if kept is None or len(kept) < num_elements:
        kept = _PER_THREAD.kept = torch.empty(num_elements)
    return kept[:num_elements]
