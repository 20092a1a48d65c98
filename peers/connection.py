"""What connects a peer with the others: DHT, averager, progress records, state exchange."""

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from opendiloco import __version__
from opendiloco.averaging.options import AveragingOptions
from opendiloco.averaging.swarm import HivemindAverager
from opendiloco.dht import NetworkOptions, SwarmDHT
from opendiloco.dht_process import forget_killed_children
from opendiloco.errors import ConfigError
from opendiloco.events import EventLog
from opendiloco.identity import Identity
from opendiloco.leaving import Leaving
from opendiloco.processes import children_named, how_ended
from opendiloco.progress.records import PeerRecord
from opendiloco.progress.tracker import ProgressTracker
from opendiloco.supervisor import Alarm, Watch, Watched
from opendiloco.tensors import Layout
from opendiloco.transfer import StateExchange
from opendiloco.units import Seconds
from peers.config import PeerConfig
from peers.terms import fingerprint_of

_AVERAGER_PATIENCE = Seconds(7.0)
_NOTE_ADDRESSES = Seconds(10.0)  # how often
_MAX_REMEMBERED = 32
_SILENT_HEARTBEATS = 4  # without news of a peer: it may be out of reach
_REJOIN = Seconds(60.0)
_MEET_AGAIN = Seconds(15.0)
_LOOK = Seconds(1.0)


class Connection:
    """Opened together, in the one order that works, watched, and closed together.

    Must be made and reopened in the main thread: hivemind forks its processes, and the kernel
    ends them with the thread that forked them. They never touch CUDA, so that they may be
    forked again when it is in use.

    Attributes:
        peer_id: libp2p identity of this peer.
        terms: The settings that all peers of the run must share.
        alarm: Set when a process behind this is lost, and when this peer is told to leave.
        dht: Where records are kept.
        averager: Averages with the others.
        tracker: Publishes this peer's record and knows the others'.
        exchange: Serves and fetches states.
    """

    def __init__(
        self,
        config: PeerConfig,
        layout: Layout,
        identity: Identity,
        *,
        terms: dict[str, str],
        log: EventLog,
        leaving: Leaving,
    ) -> None:
        """Connect.

        Args:
            config: The peer's settings.
            layout: Where the model's parameters lie.
            identity: Who this peer is.
            terms: The settings that all peers of the run must share.
            log: Receives what happens.
            leaving: Ends every wait early.

        Raises:
            ConfigError: If the port or shared memory cannot be used.
            JoinError: If none of the initial peers can be reached in time.
        """
        self.terms = terms
        self.peer_id = identity.peer_id
        self._config = config
        self._layout = layout
        self._identity = identity
        self._log = log
        self._leaving = leaving
        self._fingerprint = fingerprint_of(terms)
        self._others: dict[str, list[str]] = {}
        self._noted_at = time.monotonic()
        network = _network_options(config)
        with ExitStack() as stack:
            self.dht = stack.enter_context(self._start_dht(network))
            self.tracker = self._make_tracker()
            self._open(stack)
            self.tracker.start()
            stack.callback(self.tracker.pause)
            self._stack = stack.pop_all()
        addresses = self.dht.addresses()
        self._port = network.port or _port_of(addresses)
        log.emit(
            "started",
            peer_id=self.peer_id,
            run_id=config.run_id,
            num_params=layout.num_params,
            fingerprint=self._fingerprint,
            version=__version__,
            addresses=" ".join(addresses),
        )

    def _start_dht(self, network: NetworkOptions) -> SwarmDHT:
        return SwarmDHT.start(
            network,
            self._identity,
            on_retry=lambda text: self._log.emit("waiting", text=text),
        )

    def _start_dht_again(self, network: NetworkOptions) -> SwarmDHT:
        try:
            return self._start_dht(network)
        except ConfigError:
            if self._config.network.port:
                raise
            return self._start_dht(replace(network, port=0))  # somebody has taken it meanwhile

    def _open(self, stack: ExitStack) -> None:
        """Start all that uses the DHT, and the watch; the stack closes it."""
        run_key = f"{self._config.run_id}-{self._fingerprint}"
        self.alarm = Alarm(self._leaving.event)
        with children_named("averager"):
            self.averager = HivemindAverager(
                self.dht.dht,
                self._layout.fragment_sizes,
                self.tracker,
                run_key=run_key,
                options=_averaging_options(self._config),
                leaving=self.alarm,
            )
        stack.callback(self.averager.close)
        self.exchange = StateExchange(
            self.dht.dht, self._layout, run_key=run_key, leaving=self.alarm
        )
        stack.callback(self.exchange.close)
        self.exchange.start()
        self._watch = Watch(
            self._watched(),
            alarm=self.alarm,
            on_loss=lambda reason: self._log.emit("lost", reason=reason),
        )
        stack.callback(self._watch.close)
        self._watch.start()

    def _watched(self) -> list[Watched]:
        dht, p2pd = self.dht.watched()

        def ask_p2pd() -> None:
            p2pd.ask()
            self._note_addresses()

        (averager,) = self.averager.processes
        return [
            dht,
            Watched(
                "the averager's process",
                lambda: how_ended(averager),
                self.averager.check,
                _AVERAGER_PATIENCE,
                is_final=True,
            ),
            replace(p2pd, ask=ask_p2pd),  # last: it ends by itself when the others have
        ]

    def _note_addresses(self) -> None:
        """Remember now and then where the others are, and look for those that are silent.

        When p2pd is dead, it cannot be asked; and after a cut of the network it is for the
        peers to find each other again, even before they take each other for gone.
        """
        if time.monotonic() - self._noted_at < _NOTE_ADDRESSES:
            return
        self._noted_at = time.monotonic()
        heard = set()
        for sighting in self.tracker.sightings():
            peer_id = sighting.record.peer_id
            if sighting.record.state == "leaving":
                self._others.pop(peer_id, None)
            elif sighting.age <= _SILENT_HEARTBEATS * self._config.network.heartbeat_s:
                heard.add(peer_id)
        self._others.update(self.dht.find(sorted(heard - {self.peer_id})))
        while len(self._others) > _MAX_REMEMBERED:
            del self._others[next(iter(self._others))]
        silent = {peer: known for peer, known in self._others.items() if peer not in heard}
        if silent:
            self.dht.meet_again(silent)

    def _make_tracker(self) -> ProgressTracker:
        config = self._config
        record = PeerRecord(
            peer_id=self.peer_id,
            name=config.name or self.peer_id[-6:],
            fingerprint=self._fingerprint,
            terms=self.terms,
            client_mode=config.network.client_mode,
            version=__version__,
        )
        return ProgressTracker(
            self.dht,
            record,
            run_id=config.run_id,
            heartbeat=Seconds(config.network.heartbeat_s),
            max_age=Seconds(config.network.peer_timeout_s),
        )

    @property
    def is_leaving(self) -> bool:
        """Whether this peer was told to leave, or cannot go on before it is reopened."""
        return self.alarm.is_set()

    def say_goodbye(self) -> None:
        """Tell the others now that this peer takes part no more."""
        self.tracker.close()

    def check(self) -> None:
        """Raise :class:`SwarmLostError` if one of the processes behind this is lost."""
        self.alarm.check()

    def report_loss(self, reason: str) -> None:
        """Say that something behind this does not work any more, as its user has noticed."""
        if self.alarm.declare(reason):
            self._log.emit("lost", reason=reason)

    def reopen(self) -> None:
        """End what is left and start everything anew, with the same identity and port.

        Joins by the initial peers and by those that were there. :attr:`dht`, :attr:`averager`,
        :attr:`exchange` and :attr:`alarm` are others afterwards.

        Raises:
            JoinError: If none of the others can be reached within a minute.
            SwarmLostError: If it does not start.
        """
        others = {peer.peer_id for peer in self.tracker.view().peers}
        known = [address for peer in others for address in self._others.get(peer, [])]
        network = replace(
            _network_options(self._config),
            port=self._port,
            initial_peers=tuple(dict.fromkeys([*self._config.initial_peers, *known])),
            join_timeout=Seconds(min(_REJOIN, self._config.network.join_timeout_s)),
        )
        self._abandon()
        with ExitStack() as stack:
            self.dht = stack.enter_context(self._start_dht_again(network))
            self.tracker.resume(self.dht)
            stack.callback(self.tracker.pause)
            self._open(stack)
            self._stack = stack.pop_all()
        self._meet_again(others)

    def _abandon(self) -> None:
        """End everything without a word to the others, who need not know."""
        self.tracker.pause()
        self._watch.close()  # before: a process killed while it is asked leaves a traceback
        self.dht.kill()
        for process in self.averager.processes:
            process.kill()
        self._stack.close()
        forget_killed_children()

    def _meet_again(self, others: set[str]) -> None:
        """Wait until somebody is seen who was there: alone, this peer would average alone."""
        deadline = time.monotonic() + _MEET_AGAIN
        self.tracker.refresh(_LOOK)
        while time.monotonic() < deadline and not self.alarm.is_set():
            time.sleep(_LOOK)  # a record published just now takes a moment to be found
            self.tracker.refresh(_LOOK)
            if not others or others & {peer.peer_id for peer in self.tracker.view().peers}:
                return

    def close(self) -> None:
        """Say goodbye to the others and end every process and thread. Safe to call twice."""
        self.tracker.close()
        self._stack.close()


def _port_of(addresses: Sequence[str]) -> int:
    """Return the TCP port on which this peer listens; 0 if that is not to be seen."""
    found = re.search(r"/tcp/(\d+)", addresses[0]) if addresses else None
    return int(found[1]) if found else 0


def _network_options(config: PeerConfig) -> NetworkOptions:
    network = config.network
    return NetworkOptions(
        host=network.host,
        port=network.port,
        announce=tuple(network.announce),
        initial_peers=tuple(config.initial_peers),
        relay=network.relay,
        client_mode=network.client_mode,
        join_timeout=Seconds(network.join_timeout_s),
    )


def _averaging_options(config: PeerConfig) -> AveragingOptions:
    averaging = config.averaging
    return AveragingOptions(
        codec=averaging.codec,
        wait=Seconds(averaging.wait_s),
        matchmaking=Seconds(averaging.matchmaking_s),
        stall=Seconds(averaging.stall_timeout_s),
        exchange=Seconds(averaging.exchange_timeout_s),
        attempts=averaging.attempts,
    )
