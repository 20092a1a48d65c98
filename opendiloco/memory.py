"""Memory that was freed goes back to the system, not into the allocator's reserve."""

import ctypes
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def give_back_memory() -> None:
    """Have the C library return free pages to the system; does nothing without glibc.

    It keeps what it once got, up to blocks of 32 MiB: a round leaves several bytes per
    parameter behind that nothing uses until the next one.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
