"""What travels between two members of a round: small headers, payloads of known size."""

import enum
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

from opendiloco.averaging.codecs import Payload

_HEADER = struct.Struct("<B3xIII8s16s")

HEADER_BYTES = _HEADER.size
TAG_BYTES = 8


MAX_MEMBERS = 128
"""As many as fit into the header's set of contributors."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    PING = 0  # I am alive
    CONTRIBUTION = 1  # a part of the sender's vector, encoded; for its reducer
    AVERAGE = 2  # a part of the average, encoded; from its reducer, or from a member that has it
    WANT = 3  # indices of parts that the sender misses; for a member that has them
    STATUS = 4  # what the sender has, votes for and suspects; for the coordinator
    VIEW = 5  # who takes part from now on; from the coordinator
    PLAN = 6  # who averages or gives the parts that are missing; from the coordinator
    COMMIT = 7  # the average is decided
    ABORT = 8  # there will be no average
    LEAVE = 9  # the sender takes part no more
    ACK = 10  # so many more bytes of bulk have come in, in place of the part's index


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Attributes:
        kind: What it is.
        tag: Which round it belongs to, :data:`TAG_BYTES` bytes.
        part: Index of the part, for kinds that carry one.
        version: Plan under which the part was sent, for contributions.
        contributors: Indices of the members whose data is in it, as a bit set.
        payload: The content.
    """

    kind: FrameKind
    tag: bytes
    part: int = 0
    version: int = 0
    contributors: int = 0
    payload: Payload = b""

    @property
    def is_bulk(self) -> bool:
        """Whether it carries a part, and so many bytes that the line may be flooded."""
        return self.kind in {FrameKind.CONTRIBUTION, FrameKind.AVERAGE}

    @property
    def rank(self) -> int:
        """Frames of a lower rank are sent first.

        Averages come before contributions, so that both are under way all the time: in the
        other order every member waits twice for the slowest of all lines.
        """
        if self.kind is FrameKind.CONTRIBUTION:
            return 2
        return 1 if self.kind is FrameKind.AVERAGE else 0

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return HEADER_BYTES + len(self.payload)

    def carrying(self, payload: Payload) -> "Frame":
        """Return the same frame with another payload."""
        return replace(self, payload=payload)

    def header(self) -> bytes:
        """Return what comes before the payload."""
        return _HEADER.pack(
            self.kind,
            self.part,
            self.version,
            len(self.payload),
            self.tag,
            self.contributors.to_bytes(16, "little"),
        )


def read_header(header: bytes, *, max_payload_bytes: int) -> tuple[Frame, int]:
    """Return a frame without its payload, and the payload's length.

    Raises:
        ValueError: If the header makes no sense or announces a payload that is too long.
    """
    kind, part, version, length, tag, contributors = _HEADER.unpack(header)
    if length > max_payload_bytes:
        raise ValueError(f"a frame of {length} bytes was announced")
    return Frame(
        FrameKind(kind), tag, part, version, int.from_bytes(contributors, "little")
    ), length


def bits(indices: Iterable[int]) -> int:
    """Return a set of small indices as an integer."""
    together = 0
    for index in indices:
        together |= 1 << index
    return together


def indices_of(together: int) -> list[int]:
    """Return the indices in a set made by :func:`bits`, ascending."""
    return [index for index in range(together.bit_length()) if together >> index & 1]
