"""How patient rounds over hivemind are, and their number format on the wire."""

from collections.abc import Mapping
from dataclasses import dataclass

from hivemind.compression import CompressionBase, Float16Compression, NoCompression

from opendiloco.units import Seconds

CODECS: Mapping[str, tuple[type[CompressionBase], int]] = {
    "none": (NoCompression, 4),
    "fp16": (Float16Compression, 2),
}
"""For each codec, hivemind's class and bytes per element on the wire."""


@dataclass(frozen=True, slots=True)
class AveragingOptions:
    """How patient rounds are.

    Attributes:
        codec: Name of the wire format, one of :data:`CODECS`.
        wait: Longest time to wait for live peers that still train.
        matchmaking: Patience for late peers once the search has begun.
        stall: A peer that sends nothing for longer is dropped from the exchange.
        exchange: Longest time of one exchange.
        attempts: How often a failed exchange is tried again.
    """

    codec: str = "fp16"
    wait: Seconds = Seconds(60.0)
    matchmaking: Seconds = Seconds(5.0)
    stall: Seconds = Seconds(15.0)
    exchange: Seconds = Seconds(120.0)
    attempts: int = 3
