"""The state that all peers share: anchors, momenta, and their digests."""

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch

from opendiloco.tensors import Layout, TensorSet
from opendiloco.units import OuterStep

SLICE_ELEMENTS = 1 << 20
"""Elements of a slice, the unit of transfer and repair (4 MiB of float32)."""

LINEAGE_DIGITS = 16
"""Leading digits of a digest that peers tell each other."""

_MAX_HASHERS = 8
_WORTH_THREADS = 1 << 20  # elements: a millisecond's work


class Holders:
    """Counts who uses vectors, so that they are overwritten only when nobody else does.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._is_closed = False

    def enter(self) -> bool:
        """Begin to use them; returns False if they are being overwritten."""
        with self._lock:
            self._count += not self._is_closed
            return not self._is_closed

    def leave(self) -> None:
        """End to use them."""
        with self._lock:
            self._count -= 1

    def take_over(self) -> bool:
        """Return whether the one holder that asks is the only one; then no other can enter."""
        with self._lock:
            self._is_closed = self._count == 1
            return self._is_closed


@dataclass(frozen=True, slots=True)
class FragmentState:
    """Anchor and outer momentum of one fragment.

    Attributes:
        anchor: Parameters at the last committed outer step, flat float32 on CPU.
        momentum: Nesterov buffer, same shape; zeros before the first update.
        holders: Who uses the two.
    """

    anchor: torch.Tensor
    momentum: torch.Tensor
    holders: Holders = field(default_factory=Holders, compare=False, repr=False)


@dataclass(frozen=True)
class OuterState:
    """The outer state right after a committed outer step.

    A state that is held by two does not change: a thread can serve it while training
    computes the next, so a joining peer never receives half of each.

    Attributes:
        outer_step: Number of outer updates contained in the anchors.
        num_tokens: Tokens the whole swarm has trained on so far.
        fragments: One state per fragment of the layout.
        contributors: Peer ids of those whose data is in the last outer step, sorted: a peer
            that missed how a round ended learns here whether its work is in it.
    """

    outer_step: OuterStep
    num_tokens: int
    fragments: tuple[FragmentState, ...]
    contributors: tuple[str, ...] = ()

    @classmethod
    def initial(cls, layout: Layout, parameters: TensorSet) -> "OuterState":
        """Return the state of outer step 0 with ``parameters`` as anchor.

        Args:
            layout: Which tensor lies where.
            parameters: The freshly initialised model, any device; copied to float32 CPU.
        """
        anchors = [layout.flatten(fragment, parameters) for fragment in range(layout.num_fragments)]
        return cls(
            outer_step=OuterStep(0),
            num_tokens=0,
            fragments=tuple(FragmentState(a, torch.zeros_like(a)) for a in anchors),
        )

    @cached_property
    def slices(self) -> tuple[torch.Tensor, ...]:
        """The state's content as float32 views: anchor then momentum of each fragment."""
        return tuple(
            piece
            for fragment in self.fragments
            for vector in (fragment.anchor, fragment.momentum)
            for piece in torch.split(vector, SLICE_ELEMENTS)
        )

    @cached_property
    def slice_digests(self) -> tuple[bytes, ...]:
        """SHA-256 of every slice's bytes."""
        num_threads = min(_MAX_HASHERS, os.cpu_count() or 1, len(self.slices))
        if num_threads < 2 or sum(piece.numel() for piece in self.slices) < _WORTH_THREADS:
            return tuple(slice_digest(piece) for piece in self.slices)
        # hashlib lets go of the interpreter while it hashes a slice.
        with ThreadPoolExecutor(num_threads, thread_name_prefix="digest") as pool:
            return tuple(pool.map(slice_digest, self.slices))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all of it, hex; equal means identical."""
        return state_digest(self.outer_step, self.num_tokens, self.contributors, self.slice_digests)

    @property
    def lineage(self) -> str:
        """Leading digits of the digest: peers at one outer step average only where it is equal."""
        return self.digest[:LINEAGE_DIGITS]

    def hold(self) -> bool:
        """Keep the content from being overwritten; returns False if it is too late for that."""
        held: list[FragmentState] = []
        for fragment in self.fragments:
            if not fragment.holders.enter():
                for other in held:
                    other.holders.leave()
                return False
            held.append(fragment)
        return True

    def release(self) -> None:
        """End what :meth:`hold` began."""
        for fragment in self.fragments:
            fragment.holders.leave()

    def parameters(self, layout: Layout) -> dict[str, torch.Tensor]:
        """Return the anchors as named tensors, views not copies."""
        named: dict[str, torch.Tensor] = {}
        for index, fragment in enumerate(self.fragments):
            named.update(layout.views(index, fragment.anchor))
        return named


def state_digest(
    outer_step: int,
    num_tokens: int,
    contributors: Sequence[str],
    slice_digests: Sequence[bytes],
) -> str:
    """Return the digest of a state of which only the slices' digests are known, hex."""
    head = (str(outer_step), str(num_tokens), *contributors, str(len(slice_digests)))
    whole = hashlib.sha256((" ".join(head) + "\n").encode())
    for digest in slice_digests:
        whole.update(digest)
    return whole.hexdigest()


def slice_digest(piece: torch.Tensor) -> bytes:
    """Return the SHA-256 of the bytes of a contiguous float32 CPU tensor."""
    return hashlib.sha256(slice_bytes(piece)).digest()


def slice_bytes(piece: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous float32 CPU tensor without copying them."""
    return memoryview(cast("Any", piece.numpy())).cast("B")


def empty_state(
    layout: Layout, outer_step: OuterStep, num_tokens: int, contributors: tuple[str, ...]
) -> OuterState:
    """Return a state of the right shape with undefined content, to be filled by slices."""
    return OuterState(
        outer_step=outer_step,
        num_tokens=num_tokens,
        fragments=tuple(
            FragmentState(torch.empty(size), torch.empty(size)) for size in layout.fragment_sizes
        ),
        contributors=contributors,
    )
