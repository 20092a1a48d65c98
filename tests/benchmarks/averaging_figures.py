"""What the rounds of the averaging benchmark come to: pure functions, no processes."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opendiloco.averaging.codecs import CODECS

_FLOAT32_BYTES = 4
_BITS_PER_MBIT = 1e6


@dataclass(frozen=True, slots=True)
class RoundSample:
    """One round of all peers; of each time that of the slowest peer, in seconds.

    Attributes:
        round_s: From the order until the average was there.
        exchange_s: Thereof the exchange.
        matchmaking_s: Search for the group.
        commit_s: Agreement on the result.
        cpu_s: Processor time per peer, its whole process tree.
        cores_busy: Processors of the machine that were busy, everything on it included.
        bytes_sent: Per peer, as the averager counts; 0 if it does not.
        group_sizes: How many peers are in the average that each peer has; 0 if it has none.
        is_identical: Every peer has the same bytes.
        error: Largest distance of any element from the exact average.
        reason: Why a peer has no average.
    """

    round_s: float
    exchange_s: float
    matchmaking_s: float
    commit_s: float
    cpu_s: float
    cores_busy: float
    bytes_sent: float
    group_sizes: tuple[int, ...]
    is_identical: bool
    error: float
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every peer has the average of all."""
        return set(self.group_sizes) == {len(self.group_sizes)}


def round_sample(
    figures: Sequence[Mapping[str, Any]],
    checks: Sequence[Mapping[str, Any]],
    *,
    cpu_s: float,
    busy_s: float,
) -> RoundSample:
    """Put the peers' answers about one round together.

    Args:
        figures: What each peer measured, as of `averaging_engines.Figures`.
        checks: What each peer has: its digest, and its distance from the exact average.
        cpu_s: Processor time of all peers together.
        busy_s: Time for which the machine's processors were busy.
    """

    def slowest(field: str) -> float:
        return max(float(of_peer[field]) for of_peer in figures)

    return RoundSample(
        round_s=slowest("round_s"),
        exchange_s=slowest("exchange_s"),
        matchmaking_s=slowest("matchmaking_s"),
        commit_s=slowest("commit_s"),
        cpu_s=cpu_s / len(figures),
        cores_busy=busy_s / slowest("round_s"),
        bytes_sent=statistics.fmean(of_peer["bytes_sent"] for of_peer in figures),
        group_sizes=tuple(
            0 if of_peer["reason"] else int(of_peer["num_peers"]) for of_peer in figures
        ),
        is_identical=len({check["digest"] for check in checks}) == 1,
        error=max(check["error"] for check in checks),
        reason=next((of_peer["reason"] for of_peer in figures if of_peer["reason"]), ""),
    )


def nominal_bytes(codec: str, num_elements: int, num_peers: int) -> int:
    """Return what a peer sends in a butterfly all-reduce, and receives, without any framing."""
    return round(2 * (num_peers - 1) / num_peers * CODECS[codec].encoded_size(num_elements))


def line_share(num_bytes: float, seconds: float, *, rate_mbit: float) -> float:
    """Return which part of the line's rate the bytes made use of."""
    return round(8 * num_bytes / _BITS_PER_MBIT / seconds / rate_mbit, 3)


def summarise(
    first: RoundSample, rounds: Sequence[RoundSample], *, num_elements: int
) -> dict[str, object]:
    """Return one engine's part of a result line.

    Args:
        first: The round in which the connections were new; it does not count.
        rounds: Those after it.
        num_elements: Of the vector.
    """
    whole = [sample for sample in rounds if sample.is_whole]
    summary: dict[str, object] = {
        "rounds": len(rounds),
        "failed_rounds": len(rounds) - len(whole),
        "first_exchange_s": round(first.exchange_s, 3) if first.is_whole else None,
    }
    if not whole:
        return summary | {"reason": rounds[-1].reason if rounds else first.reason}

    def median(figure: Callable[[RoundSample], float]) -> float:
        return round(statistics.median(map(figure, whole)), 3)

    def least(figure: Callable[[RoundSample], float]) -> float:
        return round(min(map(figure, whole)), 3)

    gigabytes = _FLOAT32_BYTES * num_elements / 1e9
    return summary | {
        "exchange_s": median(lambda r: r.exchange_s),
        "exchange_min_s": least(lambda r: r.exchange_s),
        "exchange_all_s": [round(sample.exchange_s, 3) for sample in whole],
        "round_s": median(lambda r: r.round_s),
        "round_min_s": least(lambda r: r.round_s),
        "matchmaking_s": median(lambda r: r.matchmaking_s),
        "commit_s": median(lambda r: r.commit_s),
        "overhead_s": median(lambda r: r.round_s - r.exchange_s),
        "overhead_min_s": least(lambda r: r.round_s - r.exchange_s),
        "bytes_sent": round(statistics.median(sample.bytes_sent for sample in whole)) or None,
        "cpu_s_per_gb": median(lambda r: r.cpu_s / gigabytes),
        "cpu_min_s_per_gb": least(lambda r: r.cpu_s / gigabytes),
        "cores_busy": median(lambda r: r.cores_busy),
        "digests_equal": all(sample.is_identical for sample in whole),
        "largest_error": float(f"{max(sample.error for sample in whole):.3g}"),
    }
