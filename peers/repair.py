"""Brings the swarm side back when a process behind it is lost."""

import time

from opendiloco.diloco import OuterReport
from opendiloco.errors import OpenDiLoCoError, SwarmLostError
from opendiloco.events import EventLog
from opendiloco.leaving import LeaveRequestedError, Leaving
from opendiloco.supervisor import Alarm
from opendiloco.tensors import TensorSet
from opendiloco.units import Seconds
from peers.connection import Connection
from peers.swarm import Seat

_MAX_REPAIRS = 3
_WITHIN = Seconds(600.0)
"""What dies more often than that is not helped by starting it again."""


class Repairer:
    """Opens the connection anew, with the same identity, state and work; a few times."""

    def __init__(
        self, connection: Connection, seat: Seat, *, log: EventLog, leaving: Leaving
    ) -> None:
        """Make one.

        Args:
            connection: What is repaired.
            seat: Goes on with it.
            log: Receives what happens.
            leaving: A peer that leaves is not repaired.
        """
        self._connection = connection
        self._seat = seat
        self._log = log
        self._leaving = leaving
        self._repaired_at: list[float] = []

    @property
    def alarm(self) -> Alarm:
        """Set when there is something to repair, or this peer leaves."""
        return self._connection.alarm

    def repair(self, reason: str, local: TensorSet) -> OuterReport | None:
        """Repair the swarm side; returns early when this peer is told to leave.

        Must be called in the main thread.

        Args:
            reason: What is lost.
            local: The peer's parameters, named float32 CPU tensors.

        Returns:
            What is to be taken over, if the others have moved on meanwhile.

        Raises:
            SwarmLostError: If it cannot be repaired, or was too often.
        """
        if self._leaving.event.is_set():
            return None
        began_at = time.monotonic()
        reason = reason.partition("; start")[0]  # that is what happens now
        self._connection.report_loss(reason)
        self._refuse_too_many(reason, began_at)
        try:
            with self._leaving.interrupting():
                self._connection.reopen()
        except LeaveRequestedError:
            return None
        except OpenDiLoCoError as error:
            raise SwarmLostError(f"{reason}, and cannot be started again: {error}") from None
        self._log.emit("repaired", reason=reason, seconds=time.monotonic() - began_at)
        return self._seat.go_on(local)

    def _refuse_too_many(self, reason: str, moment: float) -> None:
        self._repaired_at = [at for at in self._repaired_at if moment - at < _WITHIN]
        if len(self._repaired_at) >= _MAX_REPAIRS:
            raise SwarmLostError(
                f"{reason}, after {_MAX_REPAIRS} repairs within {_WITHIN / 60:.0f} minutes; "
                "see whether this machine has enough memory, and start this peer again"
            )
        self._repaired_at.append(moment)
