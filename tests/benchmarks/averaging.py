"""One averaging round: this project's, hivemind's own and plain TCP's, in turn in one run.

Every peer is a process tree of its own; on the WAN each is a host with its own address, rate
and delay, in a network namespace (needs root). Rounds repeat over the same connections, with
a pause in between as long as a round of training would at least be; the first does not count.

    python -m tests.benchmarks.averaging --network wan --peers 2 4 --elements 10000000

writes one JSON line per case. `exchange_s` is the time from a known group until the slowest
peer has the average, `overhead_s` what the whole round takes beyond that. Plain TCP sends
the same bytes in both directions at once; the better number of connections is the baseline.
With `--cold-starts N` it starts the peers N times and counts how many first rounds were whole.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from opendiloco.averaging.codecs import CODECS
from tests.benchmarks.averaging_contestants import Peers, TcpHosts, started_peers
from tests.benchmarks.averaging_engines import ENGINES
from tests.benchmarks.averaging_figures import (
    RoundSample,
    line_share,
    nominal_bytes,
    summarise,
)
from tests.benchmarks.hosts import Place, places
from tests.benchmarks.measure import provenance

_TCP_STREAMS = (1, 2)  # per pair of hosts
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        network: ``loopback`` or ``wan``.
        peers: How many.
        elements: Of the vector, float32.
        codec: On the wire.
        rtt_ms: Of the WAN.
        rate_mbit: Of the WAN, per host and direction.
        rounds: How many count.
        pause_s: Between rounds.
        matchmaking_s: Patience for late peers.
    """

    network: str
    peers: int
    elements: int
    codec: str
    rtt_ms: float
    rate_mbit: float
    rounds: int
    pause_s: float
    matchmaking_s: float

    def encode(self) -> dict[str, object]:
        """Return it as JSON values, without what does not matter."""
        encoded = asdict(self)
        if self.network != "wan":
            del encoded["rtt_ms"], encoded["rate_mbit"]
        return encoded


def measure(case: Case, engines: Sequence[str]) -> dict[str, object]:
    """Return the result line of a case, without its provenance."""
    num_bytes = nominal_bytes(case.codec, case.elements, case.peers)
    with _hosts(case) as hosts, contextlib.ExitStack() as stack:
        peers = _start(case, engines, hosts, stack)
        baselines = _start_baselines(case, hosts, stack)
        samples: dict[str, list[RoundSample]] = {engine: [] for engine in engines}
        for number in range(1 + case.rounds):
            # In turn forwards and backwards: what else the machine does hits all alike.
            order = list(engines) if number % 2 else list(reversed(engines))
            for engine in order:
                time.sleep(case.pause_s)
                samples[engine].append(peers[engine].hold_round(number))
            for baseline in baselines.values():
                time.sleep(case.pause_s)
                baseline.hold_round(num_bytes)
        peaks = {engine: peers[engine].measure_memory(1 + case.rounds) for engine in engines}
    result: dict[str, object] = {"benchmark": "averaging", **case.encode(), "bytes": num_bytes}
    if baselines:
        result["tcp"] = _summarise_baselines(baselines, num_bytes, rate_mbit=case.rate_mbit)
    for engine, (first, *rounds) in samples.items():
        summary = summarise(first, rounds, num_elements=case.elements)
        summary["peak_memory_mib"] = round(peaks[engine] / _MIB)
        seconds = summary.get("exchange_s")
        if baselines and isinstance(seconds, float):
            summary["line_share"] = line_share(num_bytes, seconds, rate_mbit=case.rate_mbit)
            summary["tcp_share"] = round(_best(baselines)[1].seconds / seconds, 3)
        result[engine] = summary
    return result


def count_groups(case: Case, engines: Sequence[str], num_starts: int) -> dict[str, object]:
    """Start all peers anew, again and again; return how their first rounds went."""
    samples: dict[str, list[RoundSample]] = {engine: [] for engine in engines}
    for _ in range(num_starts):
        for engine in engines:
            with _hosts(case) as hosts, contextlib.ExitStack() as stack:
                peers = _start(case, [engine], hosts, stack)
                samples[engine].append(peers[engine].hold_round(0))
    result: dict[str, object] = {"benchmark": "cold_starts", **case.encode(), "starts": num_starts}
    del result["rounds"], result["pause_s"]
    for engine, rounds in samples.items():
        result[engine] = {
            "one_group": sum(sample.is_whole for sample in rounds),
            "matchmaking_s": [round(sample.matchmaking_s, 2) for sample in rounds],
            "round_s": [round(sample.round_s, 2) for sample in rounds],
            "other_groups": [sample.group_sizes for sample in rounds if not sample.is_whole],
            "reasons": sorted({sample.reason for sample in rounds if sample.reason}),
        }
    return result


def _hosts(case: Case) -> contextlib.AbstractContextManager[list[Place]]:
    return places(case.network, case.peers, rtt_ms=case.rtt_ms, rate_mbit=case.rate_mbit)


def _start(
    case: Case, engines: Sequence[str], hosts: Sequence[Place], stack: contextlib.ExitStack
) -> dict[str, Peers]:
    return started_peers(
        engines,
        hosts,
        stack,
        num_elements=case.elements,
        codec=case.codec,
        matchmaking_s=case.matchmaking_s,
    )


def _start_baselines(
    case: Case, hosts: Sequence[Place], stack: contextlib.ExitStack
) -> dict[int, TcpHosts]:
    """Start plain TCP where the line is what limits: on the WAN. By streams per pair."""
    baselines: dict[int, TcpHosts] = {}
    for streams in _TCP_STREAMS if case.network == "wan" else ():
        baselines[streams] = TcpHosts(hosts, streams=streams)
        stack.callback(baselines[streams].close)
    for baseline in baselines.values():
        baseline.connect()
    return baselines


def _best(baselines: dict[int, TcpHosts]) -> tuple[int, TcpHosts]:
    return min(baselines.items(), key=lambda entry: entry[1].seconds)


def _summarise_baselines(
    baselines: dict[int, TcpHosts], num_bytes: int, *, rate_mbit: float
) -> dict[str, object]:
    streams, best = _best(baselines)
    return {
        "best_streams": streams,
        "line_share": line_share(num_bytes, best.seconds, rate_mbit=rate_mbit),
        "by_streams": {str(n): baseline.summary() for n, baseline in baselines.items()},
    }


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for elements in arguments.elements:
        for peers in arguments.peers:
            yield Case(
                network=arguments.network,
                peers=peers,
                elements=elements,
                codec=arguments.codec,
                rtt_ms=arguments.rtt_ms,
                rate_mbit=arguments.rate_mbit,
                rounds=arguments.rounds,
                pause_s=arguments.pause_s,
                matchmaking_s=arguments.matchmaking_s,
            )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=["loopback", "wan"], default="loopback")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--elements", type=int, nargs="+", default=[10_000_000])
    parser.add_argument("--codec", choices=sorted(CODECS), default="fp16")
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=1.5)
    parser.add_argument("--matchmaking-s", type=float, default=5.0)
    parser.add_argument("--engine", choices=["both", *ENGINES], default="both")
    parser.add_argument("--cold-starts", type=int, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to it, too")
    arguments = parser.parse_args()
    if arguments.engine != "ours" and arguments.codec not in {"none", "fp16"}:
        parser.error(f"hivemind has no codec like {arguments.codec}; use --engine ours")
    return arguments


def main() -> None:
    """Print one JSON line per case."""
    arguments = _parse()
    engines = list(ENGINES) if arguments.engine == "both" else [arguments.engine]
    command = " ".join(["python -m", *sys.orig_argv[2:]])
    for case in _cases(arguments):
        if arguments.cold_starts:
            result = count_groups(case, engines, arguments.cold_starts)
        else:
            result = measure(case, engines)
        line = json.dumps(result | provenance() | {"command": command}) + "\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(line)


if __name__ == "__main__":
    main()
