"""The bootstrap node: a way into the swarm that never trains."""

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from bootstrap.config import BootstrapConfig
from opendiloco import __version__
from opendiloco.addresses import is_public
from opendiloco.dht import NetworkOptions, SwarmDHT
from opendiloco.errors import SwarmLostError
from opendiloco.events import EventLog
from opendiloco.identity import load_or_create_identity
from opendiloco.leaving import LeaveRequestedError, Leaving
from opendiloco.units import Seconds

CHECK_INTERVAL = Seconds(5.0)


def run_node(config: BootstrapConfig) -> None:
    """Serve until SIGINT or SIGTERM, then leave within seconds and leave nothing behind.

    Args:
        config: Where to listen and who to be.

    Raises:
        ConfigError: If a setting cannot be used.
        JoinError: If initial peers were given and none could be joined.
        SwarmLostError: If p2pd or the DHT ended.
    """
    if config.debug:
        logging.basicConfig(level=logging.DEBUG)
    leaving = Leaving()
    leaving.install()
    with ExitStack() as stack:
        log = EventLog(config.out_dir / "events.jsonl" if config.out_dir else None)
        stack.callback(log.close)
        try:
            dht = stack.enter_context(_start(config))
            addresses = dht.addresses()
            log.emit("started", peer_id=dht.peer_id, version=__version__, address=addresses[0])
            _tell(config, addresses)
            leaving.settle()
            while not leaving.wait(CHECK_INTERVAL):
                dht.check()
        except LeaveRequestedError:
            pass  # while starting; SwarmDHT.start has cleaned up
        except SwarmLostError as error:
            log.emit("left", reason=str(error))
            raise
        log.emit("left", reason=leaving.reason)


def _start(config: BootstrapConfig) -> SwarmDHT:
    options = NetworkOptions(
        host=config.host,
        port=config.port,
        announce=tuple(config.announce),
        initial_peers=tuple(config.initial_peers),
        relay=config.relay,
        upnp=config.upnp,
        join_timeout=Seconds(config.join_timeout_s),
        prefix="--",
        debug=config.debug,
    )
    identity = load_or_create_identity(config.identity)
    return SwarmDHT.start(options, identity, on_retry=_say)


def _tell(config: BootstrapConfig, addresses: Sequence[str]) -> None:
    """Write how to join: the command alone on stdout, for people the rest on stderr."""
    _say(f"identity: {config.identity}")
    for address in addresses[1:]:
        _say(f"also reachable as {address}")
    if not config.announce and not any(is_public(address) for address in addresses):
        _say(
            "only private addresses are known; for peers elsewhere, start again with "
            "--announce and the address by which they reach this machine"
        )
    _say("to join, run:")
    sys.stdout.write(f"opendiloco peer --initial-peers {addresses[0]}\n")
    sys.stdout.flush()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
