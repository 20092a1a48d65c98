"""What connects a peer with the others: DHT, averager, progress records, state exchange."""

import hashlib
import json
from contextlib import ExitStack

from opendiloco import __version__
from opendiloco.averaging.options import AveragingOptions
from opendiloco.averaging.swarm import HivemindAverager
from opendiloco.dht import NetworkOptions, SwarmDHT
from opendiloco.events import EventLog
from opendiloco.identity import Identity
from opendiloco.leaving import Leaving
from opendiloco.progress.records import PROTOCOL_VERSION, PeerRecord
from opendiloco.progress.tracker import ProgressTracker
from opendiloco.tensors import Layout
from opendiloco.transfer import StateExchange
from opendiloco.units import Seconds
from peers.config import PeerConfig

_FINGERPRINT_DIGITS = 16


class Connection:
    """Opened together, in the one order that works, and closed together.

    Must be made in the main thread, before CUDA and other threads are in use: hivemind
    forks its processes.

    Attributes:
        peer_id: libp2p identity of this peer.
        terms: The settings that all peers of the run must share.
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
        self._leaving = leaving
        self.peer_id = identity.peer_id
        fingerprint = _fingerprint(terms)
        run_key = f"{config.run_id}-{fingerprint}"
        with ExitStack() as stack:
            self.dht = stack.enter_context(_start_dht(config, identity, log))
            self.tracker = self._make_tracker(config, fingerprint)
            self.averager = HivemindAverager(
                self.dht.dht,
                layout.fragment_sizes,
                self.tracker,
                run_key=run_key,
                options=_averaging_options(config),
                leaving=leaving.event,
            )
            stack.callback(self.averager.close)
            leaving.install()  # hivemind: starting an averager ignores SIGINT here (1.1.12)
            self.exchange = StateExchange(
                self.dht.dht, layout, run_key=run_key, leaving=leaving.event
            )
            stack.callback(self.exchange.close)
            stack.callback(self.tracker.close)
            self.exchange.start()
            self.tracker.start()
            self._stack = stack.pop_all()
        log.emit(
            "started",
            peer_id=self.peer_id,
            run_id=config.run_id,
            num_params=layout.num_params,
            fingerprint=fingerprint,
            version=__version__,
            addresses=" ".join(self.dht.addresses()),
        )

    def _make_tracker(self, config: PeerConfig, fingerprint: str) -> ProgressTracker:
        record = PeerRecord(
            peer_id=self.peer_id,
            name=config.name or self.peer_id[-6:],
            fingerprint=fingerprint,
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
        """Whether this peer was told to leave."""
        return self._leaving.event.is_set()

    def say_goodbye(self) -> None:
        """Tell the others now that this peer takes part no more."""
        self.tracker.close()

    def check(self) -> None:
        """Raise :class:`SwarmLostError` if one of the processes behind this is dead."""
        self.dht.check()
        self.averager.check()

    def close(self) -> None:
        """Say goodbye to the others and end every process and thread. Safe to call twice."""
        self._stack.close()


def shared_terms(
    config: PeerConfig, layout: Layout, *, model: str, tokenizer: str
) -> dict[str, str]:
    """Return the settings that all peers of a run must share, by the name of their option.

    Args:
        config: The peer's settings.
        layout: Where the model's parameters lie.
        model: Digest of the model's configuration.
        tokenizer: Digest of the tokenizer.
    """
    diloco, inner = config.diloco, config.inner
    return {
        "protocol": str(PROTOCOL_VERSION),
        "model": layout.digest[:16],
        "model.config": model[:16],
        "data.tokenizer": tokenizer[:16],
        "data.seq-len": str(config.data.seq_len),
        "inner.lr": repr(inner.lr),
        "inner.min-lr-ratio": repr(inner.min_lr_ratio),
        "inner.warmup-steps": str(inner.warmup_steps),
        "inner.total-steps": str(inner.total_steps),
        "diloco.inner-steps": str(diloco.inner_steps),
        "diloco.outer-lr": repr(diloco.outer_lr),
        "diloco.outer-momentum": repr(diloco.outer_momentum),
        "diloco.num-fragments": str(diloco.num_fragments),
        "diloco.weighting": diloco.weighting,
        "averaging.codec": config.averaging.codec,
        "seed": str(config.seed),
    }


def _fingerprint(terms: dict[str, str]) -> str:
    encoded = json.dumps(terms, sort_keys=True).encode()
    return hashlib.sha256(encoded).hexdigest()[:_FINGERPRINT_DIGITS]


def _start_dht(config: PeerConfig, identity: Identity, log: EventLog) -> SwarmDHT:
    return SwarmDHT.start(
        _network_options(config),
        identity,
        on_retry=lambda text: log.emit("waiting", text=text),
    )


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
