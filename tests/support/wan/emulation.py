"""Hosts with their own addresses, rates, delays, NAT and partitions, on one Linux machine.

Every host is a network namespace; nothing leaves the machine. Needs root, a C compiler and
iproute2, and iptables for hosts behind NAT::

    with Wan([WanHost(up=200, down=200, delay_ms=50), WanHost(up=50, nat=True)]) as wan:
        subprocess.Popen([*wan.launcher(0), "python3", "-m", "http.server"])
        wan.cut(0, 1)
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_SOURCE = Path(__file__).with_name("delaynet.c")
_END = 5.0  # seconds that the switch may take to end


@dataclass(frozen=True, slots=True)
class WanHost:
    """One host.

    Attributes:
        up: From it, in Mbit/s.
        down: To it, in Mbit/s.
        delay_ms: One way; the round trip between two hosts takes twice the sum of theirs.
        nat: Behind a router that lets no connection in.
    """

    up: float = 1000.0
    down: float = 1000.0
    delay_ms: float = 0.0
    nat: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a host has sent and received so far, in bytes, and how many packets were dropped."""

    num_sent: int
    num_received: int
    num_dropped: int


class Wan:
    """A WAN that runs until it is closed. End what runs on its hosts first.

    Attributes:
        addresses: The hosts' own IPv4 addresses; that of one behind NAT is a private one.
    """

    def __init__(
        self, hosts: Sequence[WanHost], *, mtu: int = 1500, buffer_ms: float = 200.0
    ) -> None:
        """Start the switch and plug the hosts in.

        Args:
            hosts: At most 64.
            mtu: Largest packet, in bytes.
            buffer_ms: What would wait for a line longer than this is dropped.

        Raises:
            RuntimeError: If this machine cannot do it, with the reason.
        """
        tag = f"w{os.getpid()}"
        self._devices = [f"{tag}t{index}" for index in range(len(hosts))]
        self._routers = [f"{tag}r{index}" for index in range(len(hosts))]
        self._namespaces = [
            f"{tag}n{index}" if host.nat else self._routers[index]
            for index, host in enumerate(hosts)
        ]
        self.addresses = [
            f"192.168.{index + 1}.2" if host.nat else _public_address(index)
            for index, host in enumerate(hosts)
        ]
        self._switch = subprocess.Popen(
            [
                str(_compile()),
                str(buffer_ms),
                *(
                    f"{device}:{_public_address(index)}:{host.up}:{host.down}:{host.delay_ms}"
                    for index, (device, host) in enumerate(zip(self._devices, hosts, strict=True))
                ),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C must not end it before what runs on the hosts
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if self._read() != "ready":
                raise RuntimeError("the switch did not start: it needs /dev/net/tun and root")
            for index, host in enumerate(hosts):
                self._plug_in(index, mtu)
                if host.nat:
                    self._put_behind_nat(index, mtu)
            undo.pop_all()

    def launcher(self, index: int) -> tuple[str, ...]:
        """Return the words that, in front of a command, run it on a host."""
        return ("ip", "netns", "exec", self._namespaces[index])

    def set_rate(self, index: int, *, up: float, down: float) -> None:
        """Change a host's rates, in Mbit/s."""
        self._order(f"rate {self._devices[index]} {up} {down}")

    def set_delay(self, index: int, delay_ms: float) -> None:
        """Change a host's one-way delay."""
        self._order(f"delay {self._devices[index]} {delay_ms}")

    def cut(self, one: int, other: int) -> None:
        """Drop every packet between two hosts from now on, without a word to them."""
        self._order(f"cut {self._devices[one]} {self._devices[other]}")

    def heal(self, one: int, other: int) -> None:
        """Undo :meth:`cut`."""
        self._order(f"heal {self._devices[one]} {self._devices[other]}")

    def traffic(self) -> list[Traffic]:
        """Return what every host has sent and received."""
        return [
            Traffic(int(words[2]), int(words[4]), int(words[6]))
            for words in map(str.split, self._order("stats"))
        ]

    def close(self) -> None:
        """Take everything down; harmless when done twice."""
        self._switch.terminate()
        self._switch.wait(_END)
        for pipe in (self._switch.stdin, self._switch.stdout):
            if pipe is not None:
                pipe.close()
        for namespace in {*self._namespaces, *self._routers}:
            with contextlib.suppress(RuntimeError):  # it may not have been made yet
                _run(f"ip netns del {namespace}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _plug_in(self, index: int, mtu: int) -> None:
        router, device = self._routers[index], self._devices[index]
        _run(f"ip netns add {router}")
        _run(f"ip link set {device} netns {router}")
        _run(f"ip -n {router} link set lo up")
        _run(f"ip -n {router} addr add {_public_address(index)}/24 dev {device}")
        _run(f"ip -n {router} link set {device} mtu {mtu} txqueuelen 5000 up")
        _run(f"ip -n {router} route add default dev {device}")

    def _put_behind_nat(self, index: int, mtu: int) -> None:
        router, inside, device = self._routers[index], self._namespaces[index], self._devices[index]
        network, veth = f"192.168.{index + 1}", f"{inside}v"
        _run(f"ip netns add {inside}")
        _run(f"ip link add {veth} netns {router} type veth peer name eth0 netns {inside}")
        _run(f"ip -n {router} addr add {network}.1/24 dev {veth}")
        _run(f"ip -n {router} link set {veth} mtu {mtu} up")
        _run(f"ip -n {inside} link set lo up")
        _run(f"ip -n {inside} addr add {network}.2/24 dev eth0")
        _run(f"ip -n {inside} link set eth0 mtu {mtu} up")
        _run(f"ip -n {inside} route add default via {network}.1")
        _run(f"ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1")
        for rule in (
            f"-t nat -A POSTROUTING -o {device} -j MASQUERADE",
            "-P FORWARD DROP",
            "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            f"-A FORWARD -i {veth} -j ACCEPT",
            f"-A INPUT -i {device} -m conntrack --ctstate NEW -j DROP",
        ):
            _run(f"ip netns exec {router} iptables-legacy {rule}")

    def _order(self, order: str) -> list[str]:
        """Have the switch do something; return the lines of its answer."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(order + "\n")
        self._switch.stdin.flush()
        lines: list[str] = []
        while (line := self._read()) != "ok":
            if not line or line.startswith("error"):
                raise RuntimeError(line or "the switch has ended")
            lines.append(line)
        return lines

    def _read(self) -> str:
        assert self._switch.stdout is not None
        return self._switch.stdout.readline().strip()


def _public_address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def _compile() -> Path:
    """Return the switch, compiled anew only when its source is another one."""
    folder = Path(tempfile.gettempdir())
    program = folder / f"delaynet-{os.getuid()}-{_SOURCE.stat().st_mtime_ns}"
    if not program.exists():
        unfinished = program.with_suffix(f".{os.getpid()}")
        _run(f"cc -O2 -Wall -o {unfinished} {_SOURCE}")
        unfinished.replace(program)
    return program
