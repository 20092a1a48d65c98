"""Publishes this peer's record and keeps the view of the others fresh."""

import threading
import time
from collections.abc import Iterable, Mapping

from opendiloco.dht import Subkey, SwarmDHT
from opendiloco.identity import peer_id_of_public_key
from opendiloco.progress.records import PeerRecord, decode_record
from opendiloco.progress.view import Sighting, SwarmView, view_swarm
from opendiloco.units import Seconds

_SHORTEST_PAUSE = Seconds(0.1)
_DISTRUST = Seconds(60.0)
_LOOKS = 3  # at least, in which somebody must be unchanged to count as gone
_FORGET_AFTER = 10  # times the age at which a peer counts as gone


class ProgressTracker:
    """A thread that publishes the own record and reads all others'.

    It does both once per heartbeat, and at once when the record changes or somebody asks.
    """

    def __init__(
        self,
        dht: SwarmDHT,
        record: PeerRecord,
        *,
        run_id: str,
        heartbeat: Seconds,
        max_age: Seconds,
    ) -> None:
        self._dht = dht
        self._key = f"{run_id}/progress/1"
        self._heartbeat = heartbeat
        self._max_age = max_age
        self._record = record
        self._lock = threading.Condition()
        self._seen: dict[str, tuple[PeerRecord, float]] = {}
        self._attended = 0.0  # seconds during which this peer watched the others
        self._looked_at = time.monotonic()
        self._distrusted: dict[str, float] = {}
        self._num_requested = 0
        self._num_done = 0
        self._closing = False
        self._wanted = threading.Event()
        self._thread = self._new_thread()

    def start(self) -> None:
        """Begin to publish; returns at once."""
        self._thread.start()

    def pause(self, timeout: Seconds = Seconds(3.0)) -> None:
        """Stop for now, without telling the others; :meth:`resume` goes on."""
        self._stop(timeout)

    def resume(self, dht: SwarmDHT) -> None:
        """Go on over another DHT with the same record and all that was seen."""
        self._dht = dht
        self._closing = False
        self._thread = self._new_thread()
        self._thread.start()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="progress", daemon=True)

    @property
    def peer_id(self) -> str:
        """This peer, whose record is published."""
        return self._record.peer_id

    def note(self, **changes: object) -> None:
        """Change fields of the own record; it is published with the next heartbeat.

        Raises:
            ValueError: If a field or value is not one of a record's, or it gets too large.
        """
        with self._lock:
            record = PeerRecord.model_validate({**self._record.model_dump(), **changes})
            record.encode()  # one that is too large must fail here, not in the thread
            self._record = record

    def update(self, **changes: object) -> None:
        """Change fields of the own record and publish it now; see :meth:`note`."""
        self.note(**changes)
        self._wanted.set()

    def sightings(self) -> tuple[Sighting, ...]:
        """Return every record of the run that was ever seen, with its age.

        Nobody ages while this peer itself does not read the DHT, because it cannot, is slow
        or was stopped: that others cannot be seen would not mean that they are gone.
        """
        with self._lock:
            return tuple(
                Sighting(record, Seconds(self._attended - changed_at))
                for record, changed_at in self._seen.values()
            )

    def met(self, peer_ids: Iterable[str]) -> None:
        """Take note that these peers were there just now, whatever their records say.

        The DHT can be slow, most of all when some peer has just frozen. Who has averaged with
        this one is not gone, and this one not alone, because news of it are late.
        """
        with self._lock:
            for peer_id in self._seen.keys() & set(peer_ids):
                self._seen[peer_id] = (self._seen[peer_id][0], self._attended)

    def distrust(self, peer_id: str) -> None:
        """Do not believe this peer, for a minute, that it is at a later outer step.

        It gave no state that checks out. If its claim counted, everybody would wait to catch
        up with it and nobody would average.
        """
        self._distrusted[peer_id] = time.monotonic()

    @property
    def has_distrusted(self) -> bool:
        """Whether some peer is not believed at the moment."""
        moment = time.monotonic()
        return any(moment - since < _DISTRUST for since in self._distrusted.values())

    def _is_believed(self, record: PeerRecord) -> bool:
        since = time.monotonic() - self._distrusted.get(record.peer_id, -_DISTRUST)
        return since >= _DISTRUST or record.outer_step <= self._record.outer_step

    def view(self) -> SwarmView:
        """Return the live peers besides this one whose claims are believed."""
        return view_swarm(
            [sighting for sighting in self.sightings() if self._is_believed(sighting.record)],
            own_peer_id=self._record.peer_id,
            fingerprint=self._record.fingerprint,
            max_age=self._max_age,
        )

    def refresh(self, timeout: Seconds) -> None:
        """Look now; returns when the records have been read anew, or after ``timeout``."""
        with self._lock:
            self._num_requested += 1
            mine = self._num_requested
            self._wanted.set()
            self._lock.wait_for(lambda: self._num_done >= mine or self._closing, timeout)

    def close(self, timeout: Seconds = Seconds(3.0)) -> None:
        """Tell the others that this peer leaves, and stop. Safe to call twice."""
        if self._closing or not self._thread.is_alive():
            return
        self.update(state="leaving")
        self.refresh(timeout)
        self._stop(timeout)

    def _stop(self, timeout: Seconds) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        # A thread that was stuck in a DHT that is gone must not go on besides its successor.
        while not self._closing and threading.current_thread() is self._thread:
            self._wanted.clear()
            with self._lock:
                requested = self._num_requested
                self._record = self._record.model_copy(
                    update={"sequence": self._record.sequence + 1}
                )
                record = self._record
            stored = self._dht.store(
                self._key,
                self._dht.owner_subkey,
                record.encode(),
                ttl=Seconds(self._max_age + self._heartbeat),
            )
            self._take_note(self._dht.get(self._key), is_connected=stored)
            with self._lock:
                self._num_done = requested
                self._lock.notify_all()
            time.sleep(_SHORTEST_PAUSE)
            self._wanted.wait(self._heartbeat)

    def _take_note(
        self, found: Mapping[Subkey, tuple[object, float]], *, is_connected: bool
    ) -> None:
        moment = time.monotonic()
        with self._lock:
            if is_connected or found:
                # One look cannot tell that somebody is gone, however long ago the last one was.
                self._attended += min(moment - self._looked_at, self._max_age / _LOOKS)
            self._looked_at = moment
            for owner, (value, _) in found.items():
                record = decode_record(value)
                # A record counts only when signed by the peer that it is about.
                if record is None or record.peer_id != _signer(owner):
                    continue
                known = self._seen.get(record.peer_id)
                if known is None or known[0].sequence != record.sequence:
                    self._seen[record.peer_id] = (record, self._attended)
            oldest = self._attended - _FORGET_AFTER * self._max_age
            self._seen = {peer: seen for peer, seen in self._seen.items() if seen[1] >= oldest}


def _signer(owner: Subkey) -> str:
    """Return the peer id whose key signs records under this subkey; empty if it is no key."""
    prefix, suffix = b"[owner:", b"]"
    if not isinstance(owner, bytes) or not owner.startswith(prefix) or not owner.endswith(suffix):
        return ""
    try:
        return peer_id_of_public_key(owner[len(prefix) : -len(suffix)])
    except ValueError:
        return ""
