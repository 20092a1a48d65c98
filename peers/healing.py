"""Notices that this peer does not have the swarm's state, and fetches it."""

import time
from collections.abc import Sequence

from opendiloco.errors import StateUnavailableError
from opendiloco.events import EventLog
from opendiloco.progress.records import PeerRecord
from opendiloco.progress.view import SwarmView
from opendiloco.state import OuterState
from opendiloco.transfer import Download
from opendiloco.units import OuterStep, Seconds
from peers.connection import Connection

_LOOK = Seconds(1.0)
_POLL = Seconds(0.1)
_DOUBT = Seconds(60.0)


class Healer:
    """Decides by the others' records whether this peer must go on from another state.

    The rule is that of :mod:`opendiloco.progress.view`. Peers that give no state that checks
    out are not followed for a minute.
    """

    def __init__(
        self, connection: Connection, *, log: EventLog, heartbeat: Seconds, timeout: Seconds
    ) -> None:
        """Make one.

        Args:
            connection: To the others.
            log: Receives what happens.
            heartbeat: Time after which everybody's record has been published anew.
            timeout: For one download.
        """
        self._connection = connection
        self._log = log
        self._heartbeat = heartbeat
        self._timeout = timeout
        self._doubted: dict[str, float] = {}

    def fetch_better(self, own: OuterState) -> Download | None:
        """Return the state that this peer should go on from, if its own is not the right one.

        Not to be called while a round is in flight. That most peers have another state at
        the same outer step counts only when it is seen again a heartbeat later, since records
        of a round that has just ended arrive one by one.

        Args:
            own: This peer's state.
        """
        if self._connection.is_leaving:
            return None
        view = self._view()
        winners = view.prevail_over(own.outer_step, own.lineage)
        if winners and not view.ahead_of(own.outer_step):
            self._wait_a_heartbeat()
            seen = winners[0].digest
            view = self._view()
            winners = view.prevail_over(own.outer_step, own.lineage)
            if winners and winners[0].digest != seen:
                return None
        ahead = view.ahead_of(own.outer_step)
        if ahead:
            return self._catch_up(own, ahead)
        return self._heal(own, winners) if winners else None

    def _view(self) -> SwarmView:
        moment = time.monotonic()
        return SwarmView(
            tuple(
                peer
                for peer in self._connection.tracker.view().peers
                if moment - self._doubted.get(peer.peer_id, -_DOUBT) >= _DOUBT
            )
        )

    def _wait_a_heartbeat(self) -> None:
        until = time.monotonic() + self._heartbeat
        while time.monotonic() < until and not self._connection.is_leaving:
            time.sleep(_POLL)
        self._connection.tracker.refresh(_LOOK)

    def _catch_up(self, own: OuterState, ahead: Sequence[PeerRecord]) -> Download | None:
        self._log.emit("behind", outer_step=own.outer_step, swarm_outer_step=ahead[0].outer_step)
        return self._fetch(own, ahead, at_least=own.outer_step + 1)

    def _heal(self, own: OuterState, winners: Sequence[PeerRecord]) -> Download | None:
        self._log.emit(
            "waiting",
            text=f"this peer's state of outer step {own.outer_step} is not that of the others "
            f"({len(winners)} agree); taking theirs over",
        )
        download = self._fetch(own, winners, at_least=own.outer_step)
        if download is not None:
            self._log.emit(
                "healed",
                outer_step=download.state.outer_step,
                slices=download.num_slices,
                bytes=download.num_bytes,
                digest=download.state.digest,
                digest_before=own.digest,
            )
        return download

    def _fetch(
        self, own: OuterState, donors: Sequence[PeerRecord], *, at_least: int
    ) -> Download | None:
        try:
            return self._connection.exchange.fetch(
                donors, at_least=OuterStep(at_least), timeout=self._timeout, base=own
            )
        except StateUnavailableError as error:
            self._log.emit("waiting", text=str(error))
        for donor in donors:
            self._connection.tracker.distrust(donor.peer_id)
            self._doubted[donor.peer_id] = time.monotonic()
        return None
