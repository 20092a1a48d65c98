"""The p2p daemon: starting hivemind's libp2p process with our flags, and ending it."""

import collections
import contextlib
import errno
import functools
import ipaddress
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import hivemind
from hivemind.utils.multiaddr import Multiaddr

from opendiloco.addresses import complete_announced
from opendiloco.control import connect_all, find_peers, visible_addresses
from opendiloco.errors import ConfigError, SwarmLostError
from opendiloco.identity import Identity
from opendiloco.processes import (
    SOCKET_FOLDER_PREFIX,
    describe_end,
    die_with_parent,
    stop_process,
)
from opendiloco.units import Seconds

_log = logging.getLogger(__name__)

_GRACE = Seconds(3.0)
_GREETING = ("Control socket:", "Peer ID:", "Peer Addrs:", "/")
"""How the lines begin that p2pd always writes; they explain nothing when it has ended."""

_MAX_SOCKET_PATH = 100
"""Longer paths do not fit into a Unix socket's address."""


@dataclass(frozen=True)
class NetworkOptions:
    """How a peer is connected.

    Attributes:
        host: IP address to listen on.
        port: TCP port to listen on; 0 for any free one.
        announce: IP addresses, host names or multiaddresses under which others reach this peer,
            where it cannot know them itself.
        initial_peers: Multiaddresses of peers to join; empty for the first peer of a swarm.
        relay: Relay for peers that cannot be dialled.
        client_mode: Open connections, accept none.
        upnp: Ask the router to forward the port.
        join_timeout: How long to try to reach one of the initial peers.
        startup_timeout: How long p2pd and the DHT each may take to start.
        prefix: What these settings are called on the command line before their own name.
        debug: Let hivemind and p2pd log what they want.
    """

    host: str = "0.0.0.0"  # noqa: S104 - peers are there to be reached
    port: int = 0
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    relay: bool = False
    client_mode: bool = False
    upnp: bool = False
    join_timeout: Seconds = Seconds(600.0)
    startup_timeout: Seconds = Seconds(30.0)
    prefix: str = "--network."
    debug: bool = False

    def announced_addresses(self) -> list[str]:
        """Return `announce` as complete multiaddresses without peer id.

        Raises:
            ConfigError: If an entry cannot be completed.
        """
        return [
            complete_announced(entry, port=self.port, prefix=self.prefix) for entry in self.announce
        ]


class P2PDaemon:
    """A p2pd process of our own, which hivemind's processes use but do not own.

    It dies with this process. `daemon_listen_maddr` is all that `hivemind.DHT(p2p=...)` needs.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._socket_path = folder / "p2pd.sock"
        self._last_lines: collections.deque[str] = collections.deque(maxlen=20)
        self._said_something_final = threading.Event()
        self._ready = False
        self._reader = threading.Thread(target=self._read_output, name="p2pd", daemon=True)
        self._reader.start()

    @classmethod
    def start(
        cls, options: NetworkOptions, identity: Identity, *, binary: Path | None = None
    ) -> Self:
        """Start p2pd and wait until it listens; call it from the main thread.

        Args:
            options: Where to listen and what to announce. The initial peers are not used here.
            identity: Whose key p2pd proves to have.
            binary: Another p2pd than hivemind's.

        Raises:
            ConfigError: If an address or port cannot be used, or p2pd cannot run here.
            SwarmLostError: If it is not ready within `options.startup_timeout`.
        """
        announced = options.announced_addresses()
        listen = _listen_address(options)
        _check_port_is_free(options)
        folder = _private_folder()
        try:
            arguments = [
                str(binary or Path(hivemind.__file__).parent / "hivemind_cli" / "p2pd"),
                f"-listen=/unix{folder / 'p2pd.sock'}",
                f"-id={identity.path}",
                f"-hostAddrs={listen}",
                *_flags(options, announced),
            ]
            daemon = cls(_spawn(arguments, debug=options.debug), folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            daemon._wait_until_ready(options.startup_timeout)
        except BaseException:
            daemon.stop()
            raise
        return daemon

    @property
    def daemon_listen_maddr(self) -> Multiaddr:
        """The control socket's address, under the name that hivemind looks for."""
        return Multiaddr(f"/unix{self._socket_path}")

    @property
    def alive(self) -> bool:
        """Whether the process runs; it may still be frozen."""
        return self._process.poll() is None

    def check(self, *, timeout: Seconds) -> None:
        """Ask it something.

        Raises:
            SwarmLostError: If it has ended or does not answer.
        """
        try:
            visible_addresses(self._socket_path, timeout=timeout)
        except SwarmLostError:
            # It hangs up a moment before it is seen to have ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            if self.alive:
                raise
            raise SwarmLostError(f"p2pd has ended ({self.ended()}); start again") from None

    def ended(self) -> str:
        """Return how it ended, with what it wrote last; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"{describe_end(code)}; {self.last_line}"

    def kill(self) -> None:
        """End the process at once; :meth:`stop` is still due."""
        self._process.kill()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def last_line(self) -> str:
        """What it wrote last, for messages."""
        return self._last_lines[-1] if self._last_lines else "it wrote nothing"

    def addresses(self, *, timeout: Seconds = Seconds(10.0)) -> list[str]:
        """Ask for the multiaddresses, without peer id, by which it believes to be reachable.

        Raises:
            SwarmLostError: If it does not answer.
        """
        return visible_addresses(self._socket_path, timeout=timeout)

    def connect(
        self, peers: Mapping[str, Sequence[str]], *, timeout: Seconds
    ) -> dict[str, str | None]:
        """Connect to peers, given with their addresses; see `control.connect_all`."""
        return connect_all(self._socket_path, peers, timeout=timeout)

    def find(self, peer_ids: Sequence[str], *, timeout: Seconds) -> dict[str, list[str]]:
        """Return addresses of connected peers; see `control.find_peers`."""
        return find_peers(self._socket_path, peer_ids, timeout=timeout)

    def stop(self) -> None:
        """End the process and remove its socket; bounded, and harmless when done twice."""
        stop_process(self._process, _GRACE)
        self._reader.join(_GRACE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_output(self) -> None:
        """Drain what p2pd writes for ever: a full pipe would block it."""
        if self._process.stdout is None:
            return
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").strip()
                if not line.startswith(_GREETING):
                    self._last_lines.append(line)
                _log.debug("p2pd: %s", line)
                if line.startswith("Peer ID:"):
                    self._ready = True
                    self._said_something_final.set()
        self._said_something_final.set()

    def _wait_until_ready(self, timeout: Seconds) -> None:
        if not self._said_something_final.wait(timeout):
            raise SwarmLostError(
                f"p2pd was not ready within {timeout:g} s ({self.last_line}); "
                "this machine may be overloaded"
            )
        if not self._ready:
            raise ConfigError(
                f"p2pd cannot run: {self.last_line}; if that says nothing to you, "
                "reinstall hivemind for this platform"
            )


def _flags(options: NetworkOptions, announced: Sequence[str]) -> list[str]:
    switches = {
        "dhtClient" if options.client_mode else "dhtServer": True,
        "autonat": True,
        "connManager": True,
        "natPortMap": options.upnp,
        "relay": True,
        "relayService": options.relay,
        "tls": True,
    }
    flags = [f"-{name}={int(on)}" for name, on in switches.items()]
    return [*flags, f"-announceAddrs={','.join(announced)}"] if announced else flags


def _spawn(arguments: Sequence[str], *, debug: bool) -> subprocess.Popen[bytes]:
    environment = {
        "GOLOG_LOG_LEVEL": "info" if debug else "error",
        **os.environ,
        # Two peers that dial one another from their listening ports meet half-way and fail.
        "LIBP2P_TCP_REUSEPORT": "0",
    }
    try:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # Out of the terminal's group: Ctrl-C must not end it before we said goodbye.
            start_new_session=True,
            # It only makes two system calls: safe though other threads run.
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509
        )
    except OSError as error:
        raise ConfigError(
            f"p2pd cannot run: {arguments[0]}: {error.strerror}; "
            "reinstall hivemind for this platform"
        ) from None


def _private_folder() -> Path:
    """Make a folder that only this user can enter; whoever reaches the socket is the peer."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=SOCKET_FOLDER_PREFIX))
    except OSError as error:
        raise ConfigError(
            f"cannot make a temporary folder: {error.strerror}; set TMPDIR to a writable one"
        ) from None
    if len(os.fsencode(folder)) > _MAX_SOCKET_PATH - len("/p2pd.sock"):
        folder.rmdir()
        raise ConfigError(f"{folder.parent} is too long for a socket's path; set TMPDIR to /tmp")
    return folder


def _listen_address(options: NetworkOptions) -> str:
    try:
        ip = ipaddress.ip_address(options.host)
    except ValueError:
        raise ConfigError(
            f"{options.prefix}host: {options.host!r} is no IP address; "
            "0.0.0.0 listens on all of this machine"
        ) from None
    return f"/ip{ip.version}/{ip}/tcp/{options.port}"


def _check_port_is_free(options: NetworkOptions) -> None:
    """Refuse what p2pd would silently share, or report in its own words."""
    if options.port == 0:
        return
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of a former peer that linger do not count; a listener still does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as error:
            setting, remedy = "port", "choose another one, or 0 for any"
            if error.errno == errno.EADDRNOTAVAIL:
                setting, remedy = "host", "choose an address of this machine, or 0.0.0.0"
            raise ConfigError(
                f"{options.prefix}{setting}: cannot listen on {options.host} port "
                f"{options.port}: {error.strerror}; {remedy}"
            ) from None
