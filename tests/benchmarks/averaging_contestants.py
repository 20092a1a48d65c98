"""The groups of processes that take turns in the averaging benchmark."""

import contextlib
import statistics
from collections.abc import Sequence

from tests.benchmarks.averaging_engines import PeerSettings
from tests.benchmarks.averaging_figures import RoundSample, round_sample
from tests.benchmarks.hosts import Place
from tests.benchmarks.measure import ProcessTree, busy_seconds, peak_memory
from tests.benchmarks.orders import Answer, OrderedProcess, ask_all, end_all
from tests.benchmarks.plain_tcp import TcpSettings
from tests.benchmarks.swarm_side import ROUND_LIMIT

_JOIN = 120.0
_PREPARE = 120.0
_GRACE = 60.0
_MEMORY_INTERVAL = 0.05


class Peers:
    """Peers of one engine, one on each host, in a swarm of their own."""

    def __init__(
        self,
        engine: str,
        hosts: Sequence[Place],
        *,
        num_elements: int,
        codec: str,
        matchmaking_s: float,
    ) -> None:
        self._processes = [
            OrderedProcess(
                "tests.benchmarks.averaging_peer",
                PeerSettings(
                    engine=engine,
                    address=host.address,
                    member=member,
                    num_peers=len(hosts),
                    num_elements=num_elements,
                    codec=codec,
                    matchmaking_s=matchmaking_s,
                ),
                launcher=host.launcher,
            )
            for member, host in enumerate(hosts)
        ]

    def join(self) -> None:
        """Have the first one found a swarm, and all others join it in the same moment."""
        for process in self._processes:
            process.wait_until_up()
        founder, *others = self._processes
        (founded,) = ask_all([founder], "join", within=_JOIN, initial_peers=[])
        ask_all(others, "join", within=_JOIN, initial_peers=[founded["address"]])
        ask_all(self._processes, "meet", within=_JOIN)
        self._trees = [ProcessTree(process.process.pid) for process in self._processes]

    def hold_round(self, number: int) -> RoundSample:
        """Let them average once."""
        ask_all(self._processes, "prepare", within=_PREPARE, number=number)
        cpu_before, busy_before = self._cpu_seconds(), busy_seconds()
        figures = self._average()
        cpu_after, busy_after = self._cpu_seconds(), busy_seconds()
        checks = ask_all(self._processes, "check", within=_PREPARE)
        return round_sample(
            figures, checks, cpu_s=cpu_after - cpu_before, busy_s=busy_after - busy_before
        )

    def measure_memory(self, number: int) -> int:
        """Let them average once more; return the peak of the first one, in bytes.

        Looking at the memory takes time from the round, so that it cannot count as one.
        """
        ask_all(self._processes, "prepare", within=_PREPARE, number=number)
        with peak_memory(self._trees[0], interval=_MEMORY_INTERVAL) as meter:
            self._average()
        return meter.peak_bytes

    def close(self) -> None:
        """End them."""
        end_all(self._processes)

    def _average(self) -> list[Answer]:
        return ask_all(self._processes, "average", within=ROUND_LIMIT + _GRACE)

    def _cpu_seconds(self) -> float:
        return sum(tree.cpu_seconds() for tree in self._trees)


class TcpHosts:
    """The plain baseline, one process on each host."""

    def __init__(self, hosts: Sequence[Place], *, streams: int) -> None:
        self._addresses = [host.address for host in hosts]
        self._processes = [
            OrderedProcess(
                "tests.benchmarks.plain_tcp",
                TcpSettings(host.address, index, len(hosts), streams),
                launcher=host.launcher,
            )
            for index, host in enumerate(hosts)
        ]
        self._seconds: list[float] = []

    def connect(self) -> None:
        """Open the connections."""
        for process in self._processes:
            process.wait_until_up()
        ports = [answer["port"] for answer in ask_all(self._processes, "listen", within=_GRACE)]
        hosts = list(zip(self._addresses, ports, strict=True))
        ask_all(self._processes, "connect", within=_GRACE, hosts=hosts)

    def hold_round(self, num_bytes: int) -> None:
        """Have every host send so many bytes, and receive as many."""
        answers = ask_all(
            self._processes, "round", within=ROUND_LIMIT + _GRACE, num_bytes=num_bytes
        )
        self._seconds.append(max(answer["seconds"] for answer in answers))

    @property
    def seconds(self) -> float:
        """Median over all rounds but the first."""
        return statistics.median(self._seconds[1:])

    def summary(self) -> dict[str, object]:
        """Return its part of a result line."""
        return {
            "seconds": round(self.seconds, 3),
            "min_s": round(min(self._seconds[1:]), 3),
            "first_s": round(self._seconds[0], 3),
        }

    def close(self) -> None:
        """End the processes."""
        end_all(self._processes)


def started_peers(
    engines: Sequence[str],
    hosts: Sequence[Place],
    stack: contextlib.ExitStack,
    *,
    num_elements: int,
    codec: str,
    matchmaking_s: float,
) -> dict[str, Peers]:
    """Start and join the peers of every engine; the stack ends them."""
    peers: dict[str, Peers] = {}
    for engine in engines:
        peers[engine] = Peers(
            engine, hosts, num_elements=num_elements, codec=codec, matchmaking_s=matchmaking_s
        )
        stack.callback(peers[engine].close)
    for group in peers.values():
        group.join()
    return peers
