"""When a round begins, when its result is applied, and whom to wait for: all pure."""

import enum
from dataclasses import dataclass

from opendiloco.progress.view import SwarmView
from opendiloco.units import OuterStep, Seconds


class SwarmEvent(enum.Enum):
    """What happens with the swarm at the end of a span."""

    BEGIN_ROUND = "begin"
    FINISH_ROUND = "finish"


@dataclass(frozen=True, slots=True)
class Span:
    """Inner steps between two swarm events.

    Attributes:
        num_steps: Inner steps to take.
        events: What to do after them, in this order.
    """

    num_steps: int
    events: tuple[SwarmEvent, ...]


@dataclass(frozen=True, slots=True)
class OuterSchedule:
    """The rhythm of inner and outer steps.

    Attributes:
        inner_steps: H, inner steps between two averagings of the same fragment.
        num_fragments: P; outer step k averages fragment k mod P.
        overlap_steps: tau, inner steps that go on while a round is in the air.

    Source:
        Streaming DiLoCo, arXiv:2501.18512, Algorithm 2; P = 1 and tau = 0 is DiLoCo.
    """

    inner_steps: int
    num_fragments: int = 1
    overlap_steps: int = 0

    def __post_init__(self) -> None:
        if self.inner_steps < 1 or self.num_fragments < 1 or self.overlap_steps < 0:
            raise ValueError("inner_steps and num_fragments start at 1, overlap_steps at 0")
        if self.inner_steps % self.num_fragments:
            raise ValueError("inner_steps must be a multiple of num_fragments")
        if self.overlap_steps > self.steps_per_round:
            raise ValueError("overlap_steps may be at most inner_steps / num_fragments")

    @property
    def steps_per_round(self) -> int:
        """Inner steps from one round's begin to the next one's: H / P."""
        return self.inner_steps // self.num_fragments

    def fragment(self, outer_step: OuterStep) -> int:
        """Return the fragment that is averaged to get from this outer step to the next."""
        return outer_step % self.num_fragments

    def swarm_step(self, outer_step: OuterStep, inner_step: int) -> int:
        """Return the swarm's inner step, which the learning rate follows.

        Args:
            outer_step: Committed outer steps.
            inner_step: Inner steps taken since the export for the last committed round.
        """
        return outer_step * self.steps_per_round + inner_step

    def next_span(self, inner_step: int, *, in_flight: bool) -> Span:
        """Return the inner steps up to the next swarm event.

        Args:
            inner_step: Inner steps taken since the export for the last committed round.
            in_flight: Whether a round has begun and is not finished.
        """
        begin, finish = SwarmEvent.BEGIN_ROUND, SwarmEvent.FINISH_ROUND
        since_boundary = inner_step % self.steps_per_round
        to_begin = self.steps_per_round - since_boundary
        if not in_flight:
            return Span(to_begin, (begin, finish) if self.overlap_steps == 0 else (begin,))
        to_finish = self.overlap_steps - since_boundary
        if to_finish == to_begin:
            return Span(to_begin, (finish, begin))
        return Span(to_finish, (finish,))


class Readiness(enum.Enum):
    """What a peer at the end of its span should do now."""

    WAIT = "wait"
    SEARCH = "search"
    ALONE = "alone"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """Whom to wait for at the end of a span.

    Attributes:
        wait: Longest time to wait for live peers that still train.
    """

    wait: Seconds

    def decide(
        self, view: SwarmView, *, outer_step: OuterStep, waited: Seconds, lineage: str = ""
    ) -> tuple[Readiness, int]:
        """Return what to do and how many peers, this one included, will take part.

        Args:
            view: The other peers; this one is not in it.
            outer_step: Of this peer.
            waited: Time since it got ready.
            lineage: Digest in its record: it cannot average with peers that have another,
                and does not wait for them. Empty to count everybody.
        """
        if view.ahead_of(outer_step):
            return Readiness.BEHIND, 1
        ready, coming = view.ready_at(outer_step, lineage), view.coming_to(outer_step, lineage)
        if not ready and not coming:
            return Readiness.ALONE, 1
        if coming and waited < self.wait:
            return Readiness.WAIT, 1 + len(ready) + len(coming)
        if not ready:
            return Readiness.ALONE, 1
        return Readiness.SEARCH, 1 + len(ready)
