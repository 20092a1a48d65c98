"""The one place that starts the DHT: joining, retries, signed records, and a clean end."""

import contextlib
import functools
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import hivemind
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils.timed_storage import ValueWithExpiration

from opendiloco.addresses import best_first, parse_multiaddr
from opendiloco.dht_process import DHTProcess
from opendiloco.errors import JoinError, SwarmLostError
from opendiloco.identity import Identity
from opendiloco.joining import initial_peers, ping, reach, wait_until_ready
from opendiloco.p2pd import NetworkOptions, P2PDaemon
from opendiloco.processes import (
    children_named,
    remove_stale_sockets,
    tie_children_to_this_process,
)
from opendiloco.supervisor import Watched
from opendiloco.units import Seconds, UnixTime, now
from opendiloco.validators import ReadableValues

__all__ = ["MAX_VALUE_BYTES", "NetworkOptions", "Subkey", "SwarmDHT", "parse_multiaddr"]

Subkey = bytes | str | None

MAX_VALUE_BYTES = 4096
"""hivemind: 1.1.12 sends requests to the DHT's process by a pipe that loses large ones."""

_CONNECT_TIMEOUT = Seconds(10.0)
_QUESTION_TIMEOUT = Seconds(3.0)
_ONE_ANSWER = Seconds(2.0)
"""For another node of the DHT to answer. One that is frozen delays every search by that much
until it is known to be silent, and no round can begin before the search for it has ended."""
_FIRST_ANSWER = Seconds(3.0)  # for an initial peer
_PATIENCE = Seconds(7.0)  # two questions in a row, and some more
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 15.0


class SwarmDHT:
    """This peer's seat in the DHT: p2pd, hivemind's DHT process, and how to talk to them.

    The methods may be called from several threads, `start` and `close` from the main thread.

    Attributes:
        dht: hivemind's DHT, for averagers; close those before this.
        peer_id: This peer, in base58.
        owner_subkey: Records under this subkey are signed, and nobody else can write them.
    """

    def __init__(self, daemon: P2PDaemon, dht: hivemind.DHT, *, owner_subkey: bytes) -> None:
        self.dht = dht
        self.peer_id = ""
        self.owner_subkey = owner_subkey
        self._daemon = daemon
        self._announced: list[str] = []
        self._process = DHTProcess(dht)
        self._closed = False

    @classmethod
    def start(
        cls,
        options: NetworkOptions,
        identity: Identity,
        *,
        on_retry: Callable[[str], None],
        binary: Path | None = None,
    ) -> Self:
        """Start p2pd and the DHT and join the swarm, again and again until it works.

        Whatever ends it, an interrupt too, leaves no process and no file behind.

        Args:
            options: Where to listen and whom to join.
            identity: Who this peer is.
            on_retry: Takes one line about each attempt that failed.
            binary: Another p2pd than hivemind's.

        Raises:
            ConfigError: If a setting is wrong or p2pd cannot run here.
            JoinError: If no initial peer could be joined within `options.join_timeout`.
            SwarmLostError: If p2pd or the DHT does not start.
        """
        wanted = initial_peers(options, identity)
        tie_children_to_this_process()
        _quieten_hivemind(debug=options.debug)
        remove_stale_sockets(Path(tempfile.gettempdir()))
        deadline = time.monotonic() + options.join_timeout
        pause = _FIRST_PAUSE
        while True:
            left = Seconds(max(1.0, deadline - time.monotonic()))
            try:
                return cls._start_once(options, identity, wanted, patience=left, binary=binary)
            except JoinError as error:
                wait = pause * random.uniform(0.75, 1.25)  # noqa: S311 - spreads peers in time
                if time.monotonic() + wait >= deadline:
                    raise JoinError(
                        f"could not join the swarm within {options.join_timeout:g} s: {error}; "
                        "check --initial-peers and that one of them runs and can be reached"
                    ) from None
                on_retry(f"{error}; trying again in {wait:.0f} s")
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @classmethod
    def _start_once(
        cls,
        options: NetworkOptions,
        identity: Identity,
        wanted: dict[str, list[str]],
        *,
        patience: Seconds,
        binary: Path | None,
    ) -> Self:
        # A new p2pd each time: libp2p refuses for minutes to dial again where it failed before.
        with contextlib.ExitStack() as undo:
            daemon = P2PDaemon.start(options, identity, binary=binary)
            undo.callback(daemon.stop)
            reached = reach(daemon, wanted, timeout=Seconds(min(patience, _CONNECT_TIMEOUT)))
            validator = RSASignatureValidator(identity.private_key)
            with children_named("dht"):
                dht = hivemind.DHT(
                    initial_peers=[f"/p2p/{peer_id}" for peer_id in reached],
                    start=True,
                    await_ready=False,
                    p2p=daemon,
                    client_mode=options.client_mode,
                    record_validators=[validator, ReadableValues()],
                    wait_timeout=_ONE_ANSWER,
                    bootstrap_timeout=_FIRST_ANSWER,
                )
            undo.callback(DHTProcess(dht).stop)
            wait_until_ready(dht, reached, timeout=options.startup_timeout)
            undo.pop_all()
        seat = cls(daemon, dht, owner_subkey=validator.local_public_key)
        seat.peer_id = identity.peer_id
        seat._announced = options.announced_addresses()
        return seat

    def addresses(self) -> list[str]:
        """Return the multiaddresses that lead to this peer, the most useful one first.

        Raises:
            SwarmLostError: If p2pd does not answer.
        """
        ranked = best_first(self._daemon.addresses(), announced=self._announced)
        return [f"{address}/p2p/{self.peer_id}" for address in ranked]

    def find(self, peer_ids: Sequence[str]) -> dict[str, list[str]]:
        """Return the multiaddresses of those of the peers that p2pd is connected to.

        Raises:
            SwarmLostError: If p2pd does not answer.
        """
        found = self._daemon.find(peer_ids, timeout=_QUESTION_TIMEOUT)
        return {
            peer_id: [f"{address}/p2p/{peer_id}" for address in addresses]
            for peer_id, addresses in found.items()
        }

    def store(self, key: str, subkey: Subkey, value: bytes, *, ttl: Seconds) -> bool:
        """Publish a value until `ttl` from now.

        Args:
            key: What others look for.
            subkey: Whose part of the key's dictionary to write; None for a key with one value.
            value: At most `MAX_VALUE_BYTES`.
            ttl: How long the DHT keeps it.

        Returns:
            Whether the DHT took it: not, if nobody answered in time or holds a newer one.

        Raises:
            ValueError: If the value is too large.
        """
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"a value of {len(value)} bytes; the DHT takes {MAX_VALUE_BYTES}")
        expires_at = now() + ttl
        answer = self._process.call(
            lambda: self.dht.store(key, value, expires_at, subkey=subkey, return_future=True)
        )
        return answer is True

    def get(self, key: str) -> dict[Subkey, tuple[object, UnixTime]]:
        """Return the newest values under a key, with the instants at which they expire.

        Anybody may have written them, anything they like, unless the subkey is an owner's.

        Returns:
            By subkey; the subkey None for a key with one value. Empty if there is nothing, or
            nobody answered in time.
        """
        found = self._process.call(lambda: self.dht.get(key, latest=True, return_future=True))
        if not isinstance(found, ValueWithExpiration):
            return {}
        if not isinstance(found.value, dict):
            return {None: (found.value, UnixTime(found.expiration_time))}
        return {
            subkey: (entry.value, UnixTime(entry.expiration_time))
            for subkey, entry in found.value.items()
        }

    def meet_again(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Look for peers that could not be reached: after a cut nobody else does.

        Args:
            addresses: For each peer id its multiaddresses.

        Raises:
            SwarmLostError: If p2pd does not answer.
        """
        outcomes = self._daemon.connect(addresses, timeout=_QUESTION_TIMEOUT)
        reached = [peer_id for peer_id, failure in outcomes.items() if failure is None]
        if reached:
            job = functools.partial(ping, peer_ids=reached)
            self._process.call(functools.partial(self.dht.run_coroutine, job, return_future=True))

    def check(self) -> None:
        """Ask p2pd and the DHT's process whether they are there; takes up to 14 s if not.

        Raises:
            SwarmLostError: If one of them has ended or does not answer.
        """
        # In this order: p2pd ends by itself when the processes that use it have.
        if not self.dht.is_alive():
            raise SwarmLostError("the DHT's process has ended; start again")
        self._daemon.check(timeout=_PATIENCE)
        self._process.ask(timeout=_PATIENCE)

    def watched(self) -> tuple[Watched, Watched]:
        """Return the two processes, for a :class:`opendiloco.supervisor.Watch`."""
        return (
            Watched("the DHT's process", self._process.ended, self._process.ask, _PATIENCE),
            Watched(
                "p2pd",
                self._daemon.ended,
                lambda: self._daemon.check(timeout=_QUESTION_TIMEOUT),
                _PATIENCE,
            ),
        )

    def kill(self) -> None:
        """End both processes at once, so that :meth:`close` need not wait for them."""
        self.dht.kill()
        self._daemon.kill()

    def close(self) -> None:
        """End the DHT and p2pd within seconds; harmless when done twice."""
        if self._closed:
            return
        self._closed = True
        self._process.stop()
        self._daemon.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _quieten_hivemind(*, debug: bool) -> None:
    """Leave the terminal to us: hivemind prints a traceback for every peer that is lost."""
    if not debug and "HIVEMIND_LOGLEVEL" not in os.environ:
        for name in ("hivemind", "asyncio"):  # asyncio: of streams that hivemind left to it
            logging.getLogger(name).setLevel(logging.CRITICAL)
