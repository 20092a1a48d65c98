"""What a round of averaging promises, whoever runs it."""

import enum
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from opendiloco.units import OuterStep, Seconds

Fill = Callable[[torch.Tensor], None]
"""Writes this peer's contribution into a flat float32 CPU vector."""


ABSURD = "this peer's own contribution or weight is not finite, or beyond what can be averaged"
"""Why a round fails for a peer that must not be let near others'."""


class RoundOutcome(enum.Enum):
    """How a round ended."""

    AVERAGED = "averaged"
    ALONE = "alone"
    FAILED = "failed"


class RoundPhase(enum.Enum):
    """How far a round has come, as one member sees it."""

    MATCHMAKING = "matchmaking"  # about to search for the others
    FIRST_PART = "first part"  # the first part of another member is here
    EXCHANGE = "mid exchange"  # half of the average is here
    COMMIT = "commit"  # all of it is here, and the others are about to be told


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """One peer's part in one round.

    Attributes:
        outer_step: Peers at different outer steps never meet.
        fragment: Which fragment is averaged.
        fill: Runs once before every attempt, because a failed attempt can leave the buffer
            part averaged. May run in another thread, until the round's result is there.
        weight: Relative weight of this peer's contribution, more than 0.
        num_tokens: Tokens behind the contribution.
        timeout: Time for waiting and all attempts together.
        lineage: Leading digits of the digest of the state that the contribution starts from;
            peers with another one never meet. Empty where states are not compared.
    """

    outer_step: OuterStep
    fragment: int
    fill: Fill
    weight: float
    num_tokens: int
    timeout: Seconds
    lineage: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"the weight must be positive and finite, not {self.weight}")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"the timeout must be positive and finite, not {self.timeout}")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of one round.

    Attributes:
        outcome: ``FAILED`` means there is no average, and nothing has changed.
        average: Flat float32 CPU vector, valid until the next round begins; None when ``FAILED``.
        contributors: Peers whose data is in the average, this one included, by peer id, and
            the weights of their contributions; empty when ``FAILED``.
        num_tokens: Sum of their tokens.
        wait: Time spent waiting for peers that were still training.
        matchmaking: Time from then until the group was known, all attempts together.
        exchange: Time of the exchange that succeeded, or of the last one.
        commit: Time to agree on the result.
        bytes_sent: Payload bytes sent.
        bytes_received: Payload bytes received.
        attempts: Attempts made.
        reason: Why it failed, for the log; empty otherwise.
        dropped: Peer ids of members that were lost on the way, and why.
    """

    outcome: RoundOutcome
    average: torch.Tensor | None = None
    contributors: Mapping[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    wait: Seconds = Seconds(0.0)
    matchmaking: Seconds = Seconds(0.0)
    exchange: Seconds = Seconds(0.0)
    commit: Seconds = Seconds(0.0)
    bytes_sent: int = 0
    bytes_received: int = 0
    attempts: int = 0
    reason: str = ""
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_peers(self) -> int:
        """Peers in the average, this one included; 1 when there is none."""
        return max(1, len(self.contributors))

    @property
    def total_weight(self) -> float:
        """Sum of the contributors' weights."""
        return sum(self.contributors.values())


class Averager(Protocol):
    """Averages one contribution per peer and round, weighted."""

    def begin(self, request: RoundRequest) -> Future[RoundResult]:
        """Begin a round with every peer that is at the same outer step.

        One round at a time. Lost peers, a timeout and an empty swarm are outcomes, not
        exceptions; the future is done within ``request.timeout`` plus a few seconds.

        Raises:
            RuntimeError: If the previous round is not finished.
        """
        ...

    def close(self) -> None:
        """Leave the current round, if any, and free the buffers. Safe to call twice."""
        ...
