"""What the averaging benchmark makes of its measurements."""

import pytest

from tests.benchmarks.averaging_figures import (
    RoundSample,
    line_share,
    nominal_bytes,
    round_sample,
    summarise,
)


def figures(**changes: object) -> dict[str, object]:
    """What one of two peers measured in a round that went well."""
    return {
        "round_s": 2.0,
        "exchange_s": 1.5,
        "matchmaking_s": 0.3,
        "commit_s": 0.1,
        "bytes_sent": 100,
        "num_peers": 2,
        "reason": "",
        **changes,
    }


def sample(*of_peers: dict[str, object], digests: str = "aa") -> RoundSample:
    checks = [{"digest": digest, "error": 0.5} for digest in digests]
    return round_sample(of_peers, checks, cpu_s=4.0, busy_s=3.0)


def test_a_round_takes_as_long_as_its_slowest_peer() -> None:
    merged = sample(figures(exchange_s=1.0), figures(round_s=3.0))

    assert (merged.round_s, merged.exchange_s) == (3.0, 1.5)


def test_processor_time_is_per_peer() -> None:
    assert sample(figures(), figures()).cpu_s == 2.0


def test_a_round_that_one_peer_missed_is_not_whole() -> None:
    merged = sample(figures(), figures(num_peers=1, reason="lost"))

    assert not merged.is_whole
    assert merged.reason == "lost"


def test_two_groups_are_no_whole_round() -> None:
    two_pairs = [figures(num_peers=2) for _ in range(4)]

    assert not sample(*two_pairs, digests="aabb").is_whole


def test_peers_with_other_bytes_are_not_identical() -> None:
    assert not sample(figures(), figures(), digests="ab").is_identical


def test_a_failed_round_does_not_count_in_the_medians() -> None:
    good = sample(figures(), figures())
    failed = sample(figures(round_s=99.0, reason="lost"), figures())

    summary = summarise(good, [good, failed, good], num_elements=250_000_000)

    assert (summary["failed_rounds"], summary["round_s"]) == (1, 2.0)


def test_the_first_round_does_not_count() -> None:
    first = sample(figures(exchange_s=9.0), figures())
    later = sample(figures(), figures())

    summary = summarise(first, [later], num_elements=1)

    assert (summary["first_exchange_s"], summary["exchange_all_s"]) == (9.0, [1.5])


def test_processor_time_is_given_per_gigabyte_of_float32() -> None:
    round_ = sample(figures(), figures())

    summary = summarise(round_, [round_], num_elements=500_000_000)

    assert summary["cpu_s_per_gb"] == 1.0


def test_no_whole_round_gives_the_reason_and_no_times() -> None:
    failed = sample(figures(reason="lost"), figures())

    summary = summarise(failed, [failed], num_elements=1)

    assert summary["reason"] == "lost"
    assert "exchange_s" not in summary


@pytest.mark.parametrize(("codec", "num_peers", "expected"), [("fp16", 2, 2000), ("none", 4, 6000)])
def test_a_peer_sends_its_share_twice(codec: str, num_peers: int, expected: int) -> None:
    assert nominal_bytes(codec, 1000, num_peers) == expected


def test_a_full_line_has_share_one() -> None:
    assert line_share(25_000_000, 1.0, rate_mbit=200.0) == 1.0
