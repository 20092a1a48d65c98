"""What a peer asks of its averager's process, and what comes back."""

from dataclasses import dataclass

from opendiloco.averaging.group import Member
from opendiloco.units import OuterStep, Seconds


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one search for a group, and the exchange with it, is to be.

    Attributes:
        outer_step: Only peers at the same one meet,
        lineage: with the same state: leading hex digits of its digest, or nothing.
        num_elements: Of the fragment.
        weight: Of this peer's contribution.
        num_tokens: Behind it.
        num_expected: The group is complete with this many members.
        num_peers: Peers in the swarm, by the records: more than half of them must agree.
        neighbours: Peer ids that may be in the group, and whether each is a client.
        search: Time to find a group.
        exchange: Time for the exchange.
    """

    outer_step: OuterStep
    lineage: str
    num_elements: int
    weight: float
    num_tokens: int
    num_expected: int
    num_peers: int
    neighbours: tuple[tuple[str, bool], ...]
    search: Seconds
    exchange: Seconds

    @property
    def group_bits(self) -> str:
        """The part of hivemind's group key that is this attempt's own."""
        lineage = f"{int(self.lineage, 16):0{4 * len(self.lineage)}b}" if self.lineage else ""
        return f"{lineage}{self.outer_step:b}"


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """What came of an attempt.

    Attributes:
        reason: Why there is no average; empty if there is one.
        num_met: Members of the group that was found; 0 if there was none.
        contributors: Members whose data is in it.
        dropped: Peer ids that were lost on the way, and why.
        matchmaking: Time until the group was known.
        exchange: Time from then until this member had the average.
        commit: Time from then until it was decided.
        bytes_sent: To others.
        bytes_received: From others.
    """

    reason: str = ""
    num_met: int = 0
    contributors: tuple[Member, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    matchmaking: Seconds = Seconds(0.0)
    exchange: Seconds = Seconds(0.0)
    commit: Seconds = Seconds(0.0)
    bytes_sent: int = 0
    bytes_received: int = 0
