"""What people read when a peer heals."""

from peers.console import describe


def test_a_healed_peer_says_what_it_replaced_and_how_it_can_be_told() -> None:
    line = describe(
        {
            "t": 1.0,
            "event": "healed",
            "outer_step": 5,
            "slices": 3,
            "bytes": 3 * 2**22,
            "digest": "0123456789abcdef" * 4,
            "digest_before": "fedcba9876543210" * 4,
        }
    )

    assert line == (
        "healed at outer step 5: 3 slices (12.0 MiB) replaced, "
        "digest 0123456789ab instead of fedcba987654"
    )
