"""Facts about the order in which a peer reads its text."""

import hashlib
import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opendiloco.errors import ConfigError
from peers.batches import Batches


def make(num_sequences: int, *, seq_len: int = 1, seed: int = 0, peer_key: str = "a") -> Batches:
    tokens = np.arange(num_sequences * seq_len + 1, dtype=np.uint32)
    return Batches(tokens, seq_len=seq_len, seed=seed, peer_key=peer_key)


def order(batches: Batches, pass_number: int = 0) -> list[int]:
    size = batches.num_sequences
    return batches.batch(pass_number * size, size)[:, 0].div(batches.seq_len).int().tolist()


def reference_index(position: int, size: int, seed: int, peer_key: str) -> int:
    """The documented order in plain integers: four Feistel rounds, walking the cycle."""
    wrap = (1 << 64) - 1
    pass_number, value = divmod(position, size)
    message = json.dumps([seed, pass_number, peer_key]).encode()
    digest = hashlib.blake2b(message, digest_size=32).digest()
    half = max(1, -(-(size - 1).bit_length() // 2))
    while True:
        left, right = value >> half, value % (1 << half)
        for number in range(4):
            x = right ^ int.from_bytes(digest[8 * number : 8 * number + 8], "little")
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & wrap
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & wrap
            left, right = right, left ^ ((x ^ (x >> 31)) % (1 << half))
        value = (left << half) | right
        if value < size:
            return value


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 5000),
    seed=st.integers(0, 2**63),
    pass_number=st.integers(0, 10**6),
    peer_key=st.text(max_size=8),
)
def test_a_pass_visits_every_sequence_once(
    size: int, seed: int, pass_number: int, peer_key: str
) -> None:
    batches = make(size, seed=seed, peer_key=peer_key)

    assert sorted(order(batches, pass_number)) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 10**5), position=st.integers(0, 10**9), seed=st.integers(0, 9))
def test_the_order_matches_the_reference(size: int, position: int, seed: int) -> None:
    batches = make(size, seed=seed, peer_key="peer")

    assert batches.sequence_index(position) == reference_index(position, size, seed, "peer")


def test_the_order_never_changes_between_versions() -> None:
    batches = make(10, seed=7, peer_key="peer-1")

    indices = [batches.sequence_index(position) for position in range(20)]

    assert indices[:10] == [0, 4, 5, 9, 8, 1, 7, 6, 2, 3]
    assert indices[10:] == [0, 8, 6, 7, 4, 5, 2, 3, 9, 1]


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"peer_key": "b"}], ids=["another seed", "another peer"]
)
def test_other_peers_and_seeds_go_another_way(other: dict) -> None:
    ours, theirs = order(make(1000)), order(make(1000, **other))

    same = sum(a == b for a, b in zip(ours, theirs, strict=True))

    # Two random orders share one place on average; more than 10 has odds of 1e-8.
    assert same <= 10


def test_passes_differ() -> None:
    batches = make(1000)

    same = sum(a == b for a, b in zip(order(batches, 0), order(batches, 1), strict=True))

    assert same <= 10


def test_neighbours_in_the_text_are_no_neighbours_in_the_order() -> None:
    places = np.array(order(make(10_000)))

    correlation = np.corrcoef(places[:-1], places[1:])[0, 1]

    # The standard deviation for a random order is 0.01.
    assert abs(correlation) < 0.05


def test_sequences_overlap_by_one_token_and_cover_the_text() -> None:
    batches = make(7, seq_len=5)

    rows = sorted(batches.batch(0, 7).tolist())

    assert rows == [list(range(5 * i, 5 * i + 6)) for i in range(7)]


@settings(deadline=None)
@given(num_tokens=st.integers(2, 200), seq_len=st.integers(1, 50))
def test_every_sequence_that_fits_is_there(num_tokens: int, seq_len: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    if num_tokens < seq_len + 1:
        with pytest.raises(ConfigError):
            Batches(tokens, seq_len=seq_len, seed=0, peer_key="")
        return

    batches = Batches(tokens, seq_len=seq_len, seed=0, peer_key="")

    assert batches.num_sequences == (num_tokens - 1) // seq_len


@settings(deadline=None)
@given(position=st.integers(0, 20_000), counts=st.lists(st.integers(1, 700), max_size=5))
def test_reading_resumes_from_the_position_alone(position: int, counts: list[int]) -> None:
    whole = make(5000).batch(position, sum(counts) + 1)
    resumed = make(5000)

    parts = []
    for count in [*counts, 1]:
        parts.append(resumed.batch(position, count))
        position += count

    assert torch.equal(torch.cat(parts), whole)


def test_a_batch_may_run_into_the_next_pass() -> None:
    batches = make(3)

    drawn = batches.batch(2, 5)[:, 0].tolist()

    assert drawn == [*order(batches, 0)[2:], *order(batches, 1), *order(batches, 2)[:1]]


def test_a_batch_is_contiguous_and_its_own() -> None:
    batches = make(3, seq_len=4)

    batch = batches.batch(0, 2)
    again = batches.batch(0, 2)
    again.zero_()

    assert batch.dtype == torch.int64
    assert batch.shape == (2, 5)
    assert batch.is_contiguous()
    assert torch.equal(batch, make(3, seq_len=4).batch(0, 2))


def test_a_text_shorter_than_one_sequence_is_refused_with_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"--data\.seq-len: .*has 12 tokens.*needs 13; .*--data\.sources"
    ):
        Batches(np.zeros(12, dtype=np.uint16), seq_len=12, seed=0, peer_key="")


@pytest.mark.parametrize(("position", "count"), [(-1, 1), (0, 0)])
def test_positions_before_the_start_and_empty_batches_are_refused(
    position: int, count: int
) -> None:
    with pytest.raises(ValueError, match="cannot draw"):
        make(3).batch(position, count)


def test_a_huge_text_takes_no_memory_for_its_order() -> None:
    # A view of one token repeated: as large as a terabyte for the order, nothing in memory.
    tokens = np.lib.stride_tricks.as_strided(
        np.zeros(1, dtype=np.uint16), shape=(2**40,), strides=(0,)
    )

    batches = Batches(tokens, seq_len=2, seed=0, peer_key="a")

    index = batches.sequence_index(3 * 2**39 + 5)
    assert index == reference_index(3 * 2**39 + 5, 2**39 - 1, 0, "a")


def test_drawing_is_faster_than_ten_million_tokens_a_second() -> None:
    batches = make(20_000, seq_len=256)
    batches.batch(0, 16)
    started = time.perf_counter()

    for position in range(0, 4096, 16):
        batches.batch(position, 16)

    assert 4096 * 256 / (time.perf_counter() - started) > 10e6
