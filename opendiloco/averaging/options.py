"""How patient rounds over hivemind are, and in which number format they travel."""

from dataclasses import dataclass

from opendiloco.units import Seconds


@dataclass(frozen=True, slots=True)
class AveragingOptions:
    """How patient rounds are.

    Attributes:
        codec: Name of the wire format, one of :data:`opendiloco.averaging.codecs.CODECS`.
        auxiliary: Average what others send, contribute nothing and get no average. The
            weight of such a peer's requests is not used.
        wait: Longest time to wait for live peers that still train.
        matchmaking: Patience for late peers once the search has begun.
        stall: A peer that is silent for longer is dropped from the exchange.
        exchange: Longest time of one exchange.
        attempts: How often a failed exchange is tried again.
    """

    codec: str = "fp16"
    auxiliary: bool = False
    wait: Seconds = Seconds(60.0)
    matchmaking: Seconds = Seconds(5.0)
    stall: Seconds = Seconds(15.0)
    exchange: Seconds = Seconds(120.0)
    attempts: int = 3
