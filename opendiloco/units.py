"""Types for the quantities that are easily confused, and the one wall clock."""

import time
from typing import NewType

Seconds = NewType("Seconds", float)
"""A duration in seconds."""

UnixTime = NewType("UnixTime", float)
"""An instant, in seconds since 1970 by this machine's clock."""

OuterStep = NewType("OuterStep", int)
"""How many outer updates an anchor contains."""


def now() -> UnixTime:
    """Return this machine's wall-clock time; other peers' clocks may differ."""
    return UnixTime(time.time())
