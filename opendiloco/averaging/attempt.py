"""What a peer asks of its averager's process, what comes back, and what it all comes to."""

from dataclasses import dataclass, field
from typing import Any

from opendiloco.averaging.group import Member
from opendiloco.averaging.protocol import RoundOutcome, RoundResult
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


@dataclass
class Attempts:
    """What the attempts of one round have come to so far.

    Attributes:
        waited: Time spent waiting for the others before the first one.
        num: How many there were,
        num_serious: and how many with so many members that another one may not do better.
        reasons: Why they failed.
        matchmaking: Time spent searching, in all of them.
        exchange: Time of the last one's exchange,
        commit: and of its commit.
        bytes_sent: To others, in all of them.
        bytes_received: From others.
        dropped: Peer ids that were lost on the way, and why.
    """

    waited: Seconds
    num: int = 0
    num_serious: int = 0
    reasons: list[str] = field(default_factory=list)
    matchmaking: Seconds = Seconds(0.0)
    exchange: Seconds = Seconds(0.0)
    commit: Seconds = Seconds(0.0)
    bytes_sent: int = 0
    bytes_received: int = 0
    dropped: dict[str, str] = field(default_factory=dict)

    def add(self, report: AttemptReport, *, num_peers: int) -> None:
        """Take note of one more attempt."""
        self.num += 1
        # Where only some have met, the others are about to come: that cost little, and is
        # tried again as long as there is time.
        self.num_serious += not 0 < 2 * report.num_met <= num_peers
        if report.reason:
            self.reasons.append(report.reason)
        self.matchmaking = Seconds(self.matchmaking + report.matchmaking)
        self.exchange, self.commit = report.exchange, report.commit
        self.bytes_sent += report.bytes_sent
        self.bytes_received += report.bytes_received
        self.dropped.update(report.dropped)

    def _reason(self) -> str:
        return "; ".join(dict.fromkeys(self.reasons)) or "out of time"

    def result(self, outcome: RoundOutcome, **average: Any) -> RoundResult:  # noqa: ANN401 - fields of RoundResult
        """Return the round's result."""
        return RoundResult(
            outcome,
            wait=self.waited,
            matchmaking=self.matchmaking,
            exchange=self.exchange,
            commit=self.commit,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            attempts=self.num,
            reason=self._reason() if outcome is RoundOutcome.FAILED else "",
            dropped=self.dropped,
            **average,
        )
