"""Joining a swarm: reaching one of the initial peers, and saying why none could be."""

import asyncio
from collections.abc import Sequence

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID

from opendiloco.addresses import parse_multiaddr, peer_id_of
from opendiloco.errors import ConfigError, JoinError, SwarmLostError
from opendiloco.identity import Identity
from opendiloco.p2pd import NetworkOptions, P2PDaemon
from opendiloco.units import Seconds


def initial_peers(options: NetworkOptions, identity: Identity) -> dict[str, list[str]]:
    """Return the checked initial peers: for each peer id its addresses.

    Raises:
        ConfigError: If an address is wrong, or this peer's own.
    """
    peers: dict[str, list[str]] = {}
    for text in options.initial_peers:
        address = parse_multiaddr(text)
        peer_id = peer_id_of(address)
        if peer_id == identity.peer_id:
            raise ConfigError(
                f"--initial-peers: {address} is this peer itself; leave it out, or if it is "
                f"another machine, move the copied identity file {identity.path} away"
            )
        peers.setdefault(peer_id, []).append(address)
    return peers


def reach(daemon: P2PDaemon, peers: dict[str, list[str]], *, timeout: Seconds) -> list[str]:
    """Connect to the initial peers; return the ids of those that could be reached.

    Raises:
        JoinError: If none of them could.
    """
    outcomes = daemon.connect(peers, timeout=timeout) if peers else {}
    reached = [peer_id for peer_id, failure in outcomes.items() if failure is None]
    if peers and not reached:
        raise JoinError(
            "; ".join(f"{peers[peer_id][0]}: {failure}" for peer_id, failure in outcomes.items())
        )
    return reached


def wait_until_ready(dht: hivemind.DHT, reached: Sequence[str], *, timeout: Seconds) -> None:
    """Wait until the DHT's process has joined the DHT of the peers that were reached.

    Raises:
        SwarmLostError: If it does not start.
        JoinError: If those peers do not take it in.
    """
    try:
        dht.wait_until_ready(timeout)
    except TimeoutError:
        raise SwarmLostError(
            f"the DHT was not ready within {timeout:g} s; this machine may be overloaded"
        ) from None
    except Exception as error:
        if not reached:
            raise SwarmLostError(f"the DHT did not start: {error}") from error
        raise JoinError(f"{', '.join(reached)}: {_why(error)}") from error


def _why(error: Exception) -> str:
    text = str(error)
    if "local time" in text:
        return "its clock and this machine's differ by more than 3 s; set the clock (NTP)"
    if "responded to a ping" in text:
        return "reached, but its DHT does not answer"
    return text.splitlines()[0] if text else repr(error)


async def ping(_dht: hivemind.DHT, node: DHTNode, *, peer_ids: Sequence[str]) -> None:
    """Have both sides take each other into their routing tables; runs in the DHT's process."""
    pings = [node.protocol.call_ping(PeerID.from_base58(peer_id)) for peer_id in peer_ids]
    await asyncio.gather(*pings, return_exceptions=True)


async def answer(_dht: hivemind.DHT, _node: DHTNode) -> bool:
    """Show that the DHT's process, in which this runs, does run."""
    return True
