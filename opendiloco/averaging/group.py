"""Who takes part in one exchange, and which part of the vector is whose."""

import enum
import math
from dataclasses import dataclass
from functools import cached_property

from opendiloco.averaging.frames import MAX_MEMBERS

_PART_ELEMENTS = 1 << 17
"""Elements of a part, at most: 256 KiB in fp16. Larger parts make the pipeline coarse and
double the time of a round; smaller ones cost more time per byte."""

_PARTS_PER_REDUCER = 4
"""With fewer parts a reducer could not send averages while contributions still arrive."""

_LARGEST_SHARE = 2.0**50
"""Weight or tokens that a peer may claim for one round."""


class Role(enum.Enum):
    """What a member does in an exchange."""

    FULL = "full"  # contributes and reduces
    CLIENT = "client"  # contributes; cannot be dialled, so it reduces nothing
    AUXILIARY = "auxiliary"  # reduces, contributes nothing and receives nothing


@dataclass(frozen=True, slots=True)
class Member:
    """One peer of a group.

    Attributes:
        peer_id: libp2p identity.
        role: What it does.
        weight: Of its contribution; 0 for an auxiliary.
        num_tokens: Behind its contribution.
    """

    peer_id: str
    role: Role
    weight: float = 1.0
    num_tokens: int = 0

    @property
    def is_trainer(self) -> bool:
        """Whether it contributes, and wants the average."""
        return self.role is not Role.AUXILIARY

    @property
    def is_reducer(self) -> bool:
        """Whether it averages a share of the parts."""
        return self.role is not Role.CLIENT

    @property
    def makes_sense(self) -> bool:
        """Whether what it announced can be used."""
        if self.role is Role.AUXILIARY:
            return True
        return 0 < self.weight <= _LARGEST_SHARE and 0 <= self.num_tokens <= _LARGEST_SHARE


@dataclass(frozen=True)
class Group:
    """The members of one exchange; the same on all of them, but for ``me``.

    Attributes:
        tag: Names the exchange on the wire.
        members: In the same order everywhere; a member is known by its index.
        me: Index of this peer.
        quorum: Votes that an average needs: more than half of the trainers of the group
            and of the swarm, so that no two groups can both succeed.
    """

    tag: bytes
    members: tuple[Member, ...]
    me: int
    quorum: int

    def __post_init__(self) -> None:
        if not 0 <= self.me < len(self.members) <= MAX_MEMBERS:
            raise ValueError(f"a group has 1 to {MAX_MEMBERS} members, this peer among them")
        if len({member.peer_id for member in self.members}) < len(self.members):
            raise ValueError("a peer is twice in the group")

    @cached_property
    def trainers(self) -> frozenset[int]:
        """Who contributes."""
        return frozenset(i for i, member in enumerate(self.members) if member.is_trainer)

    @cached_property
    def reducers(self) -> frozenset[int]:
        """Who averages."""
        return frozenset(i for i, member in enumerate(self.members) if member.is_reducer)

    @cached_property
    def senseless(self) -> frozenset[int]:
        """Whose announcement cannot be used; all members see the same ones."""
        return frozenset(i for i, member in enumerate(self.members) if not member.makes_sense)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Index of every peer id."""
        return {member.peer_id: index for index, member in enumerate(self.members)}

    def are_linked(self, one: int, other: int) -> bool:
        """Return whether two members talk to each other: not if both are clients."""
        return one != other and bool({one, other} & self.reducers)


@dataclass(frozen=True, slots=True)
class Parts:
    """A vector cut into parts.

    Attributes:
        num_elements: Of the vector.
        part_elements: Of every part but the last, which may be shorter.
    """

    num_elements: int
    part_elements: int

    @classmethod
    def of(cls, num_elements: int, *, num_reducers: int, block_elements: int) -> "Parts":
        """Cut a vector so that all reducers are busy from the beginning.

        Args:
            num_elements: Of the vector.
            num_reducers: Among whom the parts are divided.
            block_elements: Parts begin at multiples of this, for the codec.
        """
        fair = math.ceil(num_elements / (_PARTS_PER_REDUCER * num_reducers))
        elements = max(1, min(_PART_ELEMENTS, fair))
        return cls(num_elements, math.ceil(elements / block_elements) * block_elements)

    def __len__(self) -> int:
        return math.ceil(self.num_elements / self.part_elements)

    def bounds(self, part: int) -> tuple[int, int]:
        """Return where a part begins and ends, in elements."""
        begin = part * self.part_elements
        return begin, min(begin + self.part_elements, self.num_elements)

    def reducers(self, among: frozenset[int]) -> list[int]:
        """Return for every part who averages it: contiguous shares of equal size."""
        ordered = sorted(among)
        return [ordered[part * len(ordered) // len(self)] for part in range(len(self))]
