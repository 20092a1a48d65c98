"""The swarm as one peer sees it, computed from records: no clock, no network.

Which state a peer should have. Peers whose states are identical, at one outer step and with
one digest, form a lineage; when a round goes wrong or the network is cut, there can be several.

1. The later outer step wins: a peer goes to those that are :meth:`~SwarmView.ahead_of` it.
   It cannot tell by a record whether they went on from its own state or from another.
2. At the same outer step most peers win: the others go to those that
   :meth:`~SwarmView.prevail_over` them. In a tie the smaller digest wins.

Nobody ever goes back to an earlier outer step, and a lineage that loses peers at its outer
step loses to the same one again, so that all end in one. What decides a tie must not change
while others look: a digest belongs to the state, tokens that peers have trained on do not.

A record is no proof. Whoever follows it must get a state that checks out, or leave it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from opendiloco.progress.records import PeerRecord
from opendiloco.units import OuterStep, Seconds


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record and how long ago it was seen to change.

    The age is measured by the observer, so that other peers' clocks do not matter.
    """

    record: PeerRecord
    age: Seconds


@dataclass(frozen=True, slots=True)
class SwarmView:
    """The other live peers of the run.

    Attributes:
        peers: Their records, without this peer's own and without peers that left.
    """

    peers: tuple[PeerRecord, ...] = ()

    def coming_to(self, outer_step: OuterStep, lineage: str = "") -> tuple[PeerRecord, ...]:
        """Return the peers that are on their way to the round after this outer step.

        These are the peers that train from it; those still busy with the round that led to
        it; and at outer step 0 those that join, because they start from the same seed.

        Args:
            outer_step: Of this peer.
            lineage: Digest in this peer's record: who trains from another state is not
                coming. Empty to count everybody; who announces no digest counts, too.
        """
        finishing = self._in_state("averaging", OuterStep(outer_step - 1))
        joining = self._in_state("joining", outer_step) if outer_step == 0 else ()
        return self._in_state("training", outer_step, lineage) + finishing + joining

    def ready_at(self, outer_step: OuterStep, lineage: str = "") -> tuple[PeerRecord, ...]:
        """Return the peers that have finished their inner steps and want to average.

        The arguments are those of :meth:`coming_to`.
        """
        return self._in_state("averaging", outer_step, lineage)

    def members(self) -> tuple[PeerRecord, ...]:
        """Return the peers that hold a state of the run: all but those still joining."""
        return tuple(peer for peer in self.peers if peer.state in {"training", "averaging"})

    def ahead_of(self, outer_step: OuterStep) -> tuple[PeerRecord, ...]:
        """Return the peers that claim a later outer step, best donors first.

        The order is by the number of peers with that state, then by the outer step: one
        peer's claim to be far ahead does not come before what several agree on. A claim
        is only believed when a state that checks out comes with it.
        """
        ahead = [peer for peer in self.members() if peer.outer_step > outer_step]
        crowd = Counter((peer.outer_step, peer.digest) for peer in ahead)

        def rank(peer: PeerRecord) -> tuple[int, int, str, str]:
            size = crowd[peer.outer_step, peer.digest]
            return -size, -peer.outer_step, peer.digest, peer.peer_id

        return tuple(sorted(ahead, key=rank))

    def prevail_over(self, outer_step: OuterStep, lineage: str) -> tuple[PeerRecord, ...]:
        """Return the peers whose state this peer must take over; none if its own is right.

        All are at this outer step and have the digest that most peers have there. Peers
        still busy with the round that led to it may turn out to have any state: while they
        could turn the balance, nobody prevails.

        Args:
            outer_step: Of this peer.
            lineage: Digest in this peer's record.
        """
        peers = [p for p in self.members() if p.outer_step == outer_step and p.digest]
        crowd = Counter(peer.digest for peer in peers)
        crowd[lineage] += 1
        best = min(crowd, key=lambda digest: (-crowd[digest], digest))
        undecided = len(self._in_state("averaging", OuterStep(outer_step - 1)))
        if best == lineage or (undecided and crowd[best] <= crowd[lineage] + undecided):
            return ()
        return tuple(peer for peer in peers if peer.digest == best)

    def inner_step_at(self, outer_step: OuterStep) -> int:
        """Return the median inner step of the peers at this outer step; 0 without any."""
        steps = sorted(peer.inner_step for peer in self.members() if peer.outer_step == outer_step)
        return steps[(len(steps) - 1) // 2] if steps else 0

    def _in_state(
        self, state: str, outer_step: OuterStep, lineage: str = ""
    ) -> tuple[PeerRecord, ...]:
        return tuple(
            peer
            for peer in self.peers
            if peer.state == state
            and peer.outer_step == outer_step
            and (not lineage or peer.digest in {"", lineage})
        )


def view_swarm(
    sightings: Iterable[Sighting], *, own_peer_id: str, fingerprint: str, max_age: Seconds
) -> SwarmView:
    """Summarise the records of one run.

    Args:
        sightings: One per peer, in any order; stale ones and the own one included.
        own_peer_id: This peer, left out of the view.
        fingerprint: Peers with another one train something else and are left out.
        max_age: A peer whose record has not changed for longer counts as gone.
    """
    return SwarmView(
        tuple(
            sorted(
                (
                    sighting.record
                    for sighting in sightings
                    if sighting.age <= max_age
                    and sighting.record.peer_id != own_peer_id
                    and sighting.record.fingerprint == fingerprint
                    and sighting.record.state != "leaving"
                ),
                key=lambda record: record.peer_id,
            )
        )
    )


def foreign_terms(
    sightings: Iterable[Sighting], *, own_peer_id: str, terms: dict[str, str], max_age: Seconds
) -> dict[str, tuple[str, str]]:
    """Return the settings in which the live swarm differs from this peer.

    Args:
        sightings: All records of the run.
        own_peer_id: This peer, which does not count.
        terms: This peer's settings.
        max_age: Older records do not count.

    Returns:
        For each differing setting its value here and its value with most peers; empty when
        some live peer has the same settings, or when there is no live peer.
    """
    live = [
        sighting.record
        for sighting in sightings
        if sighting.age <= max_age
        and sighting.record.peer_id != own_peer_id
        and sighting.record.state != "leaving"
    ]
    if not live or any(record.terms == terms for record in live):
        return {}
    fingerprints = [record.fingerprint for record in live]
    theirs = max(live, key=lambda record: fingerprints.count(record.fingerprint)).terms
    return {
        name: (terms.get(name, "(unset)"), theirs.get(name, "(unset)"))
        for name in sorted(terms.keys() | theirs.keys())
        if terms.get(name) != theirs.get(name)
    }
