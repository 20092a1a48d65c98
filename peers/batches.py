"""Which sequences a peer trains on: an order that is a pure function of one integer."""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from opendiloco.errors import ConfigError
from peers.tokenizer import TokenArray

_NUM_ROUNDS = 4

# Positions that are permuted together: numpy's overhead per call is far above its work.
_BLOCK = 4096


class Batches:
    """The sequences of a token file in an order that is a pure function of one integer.

    Sequence i is `tokens[i * seq_len : i * seq_len + seq_len + 1]`: packed, without
    padding, and overlapping by one so that every token after the first is a target once.
    In each pass over the text every sequence comes once, in an order of this pass and peer.

    Args:
        tokens: uint16 or uint32 [num_tokens]; copied nowhere.
        seq_len: Inputs per sequence, in tokens.
        seed: Of the run.
        peer_key: What tells this peer from the others; each goes its own way.

    Raises:
        ConfigError: If the text is shorter than one sequence.
    """

    def __init__(self, tokens: TokenArray, *, seq_len: int, seed: int, peer_key: str) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, not {seq_len}")
        if tokens.size < seq_len + 1:
            raise ConfigError(
                f"--data.seq-len: the text has {tokens.size} tokens, one sequence needs "
                f"{seq_len + 1}; choose a smaller one or give more text with --data.sources"
            )
        # Rows of the view start seq_len tokens apart and share their memory with the file.
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), seq_len + 1)
        self._sequences = windows[::seq_len]
        self._seed = seed
        self._peer_key = peer_key
        self.seq_len = seq_len
        self.num_sequences = int(self._sequences.shape[0])

    def sequence_index(self, position: int) -> int:
        """Return which sequence comes at this position, in O(1) time and memory."""
        return int(self._sequence_indices(position, 1)[0])

    def batch(self, position: int, count: int) -> torch.Tensor:
        """Return the sequences at `position` and after it.

        Args:
            position: Sequences drawn before; all that is needed to resume.
            count: Sequences to draw; may run into the next pass.

        Returns:
            int64 [count, seq_len + 1], contiguous and its own: inputs are all but the
            last column, targets all but the first.
        """
        rows = self._sequences[self._sequence_indices(position, count)]
        return torch.from_numpy(rows.astype(np.int64, order="C"))

    def _sequence_indices(self, position: int, count: int) -> npt.NDArray[np.intp]:
        if position < 0 or count < 1:
            raise ValueError(f"cannot draw {count} sequences at position {position}")
        parts: list[npt.NDArray[np.intp]] = []
        while count > 0:
            pass_number, offset = divmod(position, self.num_sequences)
            block, start = divmod(offset, _BLOCK)
            order = _order(
                self.num_sequences,
                block,
                seed=self._seed,
                pass_number=pass_number,
                peer_key=self._peer_key,
            )
            parts.append(order[start : start + count])
            position += parts[-1].size
            count -= parts[-1].size
        return np.concatenate(parts)


@lru_cache(maxsize=16)
def _order(
    size: int, block: int, *, seed: int, pass_number: int, peer_key: str
) -> npt.NDArray[np.intp]:
    """Return the sequences at one block of positions of a pass; read-only."""
    message = json.dumps([seed, pass_number, peer_key]).encode()
    digest = hashlib.blake2b(message, digest_size=8 * _NUM_ROUNDS).digest()
    keys = [
        int.from_bytes(digest[start : start + 8], "little") for start in range(0, len(digest), 8)
    ]
    places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, size), dtype=np.uint64)
    order = _permute(places, size=size, keys=keys).astype(np.intp)
    order.flags.writeable = False
    return order


def _permute(
    values: npt.NDArray[np.uint64], *, size: int, keys: Sequence[int]
) -> npt.NDArray[np.uint64]:
    """Map [0, size) onto itself: a Feistel network, repeated until the result is inside.

    Source:
        Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mapped = _feistel(values, half_bits=half_bits, keys=keys)
    outside = np.flatnonzero(mapped >= size)
    while outside.size:
        mapped[outside] = _feistel(mapped[outside], half_bits=half_bits, keys=keys)
        outside = outside[mapped[outside] >= size]
    return mapped


def _feistel(
    values: npt.NDArray[np.uint64], *, half_bits: int, keys: Sequence[int]
) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # The finaliser of SplitMix64 (Steele et al. 2014); uint64 arrays wrap around.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
