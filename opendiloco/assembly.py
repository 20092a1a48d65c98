"""A state put together from the slices that donors offer, each checked by its digest."""

import asyncio
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from opendiloco.outer import is_finite
from opendiloco.state import OuterState, empty_state, slice_bytes, slice_digest, state_digest
from opendiloco.tensors import Layout
from opendiloco.units import OuterStep, Seconds

_MAX_CONTRIBUTORS = 1 << 12
_PeerID = Annotated[str, Field(pattern="^[0-9A-Za-z._-]{1,128}$")]


class DonorError(Exception):
    """This donor is of no use; the message says why."""


class Manifest(BaseModel):
    """What a donor offers; the slices follow in the order in which they are asked for."""

    model_config = ConfigDict(strict=True)

    outer_step: Annotated[int, Field(ge=0, le=2**60)]
    num_tokens: Annotated[int, Field(ge=0, le=2**60)]
    contributors: Annotated[list[_PeerID], Field(max_length=_MAX_CONTRIBUTORS)]
    slice_digests: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]

    @property
    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of every slice."""
        return tuple(bytes.fromhex(digest) for digest in self.slice_digests)

    @property
    def digest(self) -> str:
        """Digest of the state that is offered, hex."""
        return state_digest(self.outer_step, self.num_tokens, self.contributors, self.digests)


class Assemblies:
    """The states that donors offer, each once: what one donor gave stays for the next."""

    def __init__(self, layout: Layout, base: OuterState | None) -> None:
        self._layout = layout
        self._base = base
        self._by_digest: dict[str, Assembly] = {}

    @property
    def num_bytes(self) -> int:
        """Payload received for all of them."""
        return sum(assembly.num_bytes for assembly in self._by_digest.values())

    async def get(self, manifest: Manifest) -> "Assembly":
        """Return the one for what a donor offers.

        Raises:
            DonorError: If it is not the state of a model of this layout.
        """
        known = self._by_digest.get(manifest.digest)
        if known is not None:
            return known
        state = empty_state(
            self._layout,
            OuterStep(manifest.outer_step),
            num_tokens=manifest.num_tokens,
            contributors=tuple(manifest.contributors),
        )
        if len(manifest.digests) != len(state.slices):
            raise DonorError("its state is of another model")
        assembly = self._by_digest[manifest.digest] = Assembly(state, manifest.digests)
        if self._base is not None:
            # Hashing a large state takes seconds, in which other peers want to be served.
            await asyncio.to_thread(assembly.copy_equal, self._base)
        return assembly


class Assembly:
    """A state that is being put together from slices.

    Attributes:
        state: Undefined where slices are missing.
        num_bytes: Payload received, damaged slices included.
        num_received: Slices received whole.
    """

    def __init__(self, state: OuterState, digests: tuple[bytes, ...]) -> None:
        self.state = state
        self._digests = digests
        self._have = [False] * len(digests)
        self.num_bytes = 0
        self.num_received = 0

    def copy_equal(self, base: OuterState) -> None:
        """Take the slices that are equal in a state of the same layout."""
        for index, (target, piece) in enumerate(zip(self.state.slices, base.slices, strict=True)):
            if base.slice_digests[index] != self._digests[index]:
                continue
            target.copy_(piece)
            # Memory that went bad since the base was hashed must not be copied on.
            self._have[index] = slice_digest(target) == self._digests[index]

    def missing(self) -> list[int]:
        """Return the indices of the slices that are not there yet."""
        return [index for index, have in enumerate(self._have) if not have]

    async def receive(self, reader: asyncio.StreamReader, *, stall: Seconds) -> None:
        """Read all missing slices, in order; what was read stays when it fails.

        Args:
            reader: Where they come from.
            stall: Longest time for one slice.

        Raises:
            DonorError: If a slice is damaged.
            TimeoutError: If one takes too long.
            EOFError: If there are no more.
        """
        for index in self.missing():
            target = self.state.slices[index]
            content = await asyncio.wait_for(reader.readexactly(4 * target.numel()), stall)
            self.num_bytes += len(content)
            slice_bytes(target)[:] = content
            if slice_digest(target) != self._digests[index]:
                raise DonorError(f"slice {index} is damaged")
            self._have[index] = True
            self.num_received += 1

    def check(self) -> None:
        """Raise :class:`DonorError` if the complete state holds values that are not finite."""
        if not all(is_finite(piece) for piece in self.state.slices):
            raise DonorError("its state has values that are not finite")
