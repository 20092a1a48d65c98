"""Host memory of the swarm side, in bytes per parameter: at rest, and at the peak of a round.

Two peers take outer steps over loopback, once with a model of some size and once with next
to none; the difference is what the parameters cost. Counted is the whole process tree of the
peer that takes more, shared memory too; a page that processes share counts once.

    python -m tests.benchmarks.averaging_memory --params 25000000

The model itself takes no memory here: it belongs to training, not to the swarm side.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opendiloco.averaging.codecs import CODECS
from tests.benchmarks.measure import PeakMeter, ProcessTree, peak_memory, provenance
from tests.benchmarks.memory_peer import MemorySettings
from tests.benchmarks.orders import OrderedProcess, ask_all, end_all

_NUM_PEERS = 2
_NEXT_TO_NONE = 1000
_WITHIN = 300.0
_INTERVAL = 0.02
_SETTLE = 2.0  # until what a step has started in the background is over
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """What a peer takes, in bytes.

    Attributes:
        joined: Before the first outer step.
        peak: The most in any outer step.
        rest: After the last one.
        is_exact: Both peers committed every step, with the same digest.
    """

    joined: int
    peak: int
    rest: int
    is_exact: bool


def measure(num_params: int, *, codec: str, num_steps: int) -> Memory:
    """Have two peers take outer steps, and return what the larger one takes."""
    with _joined_peers(num_params, codec) as peers:
        trees = [ProcessTree(peer.process.pid) for peer in peers]
        time.sleep(_SETTLE)
        joined = max(tree.memory_bytes() for tree in trees)
        is_exact = True
        with contextlib.ExitStack() as stack:
            meters: list[PeakMeter] = [
                stack.enter_context(peak_memory(tree, interval=_INTERVAL)) for tree in trees
            ]
            for _ in range(num_steps):
                answers = ask_all(peers, "step", within=_WITHIN)
                is_exact &= answers[0] == answers[1] and answers[0]["num_peers"] == _NUM_PEERS
        time.sleep(_SETTLE)
        rest = max(tree.memory_bytes() for tree in trees)
    return Memory(joined, max(meter.peak_bytes for meter in meters), rest, is_exact)


@contextmanager
def _joined_peers(num_params: int, codec: str) -> Iterator[Sequence[OrderedProcess]]:
    peers = [
        OrderedProcess(
            "tests.benchmarks.memory_peer",
            MemorySettings(member, _NUM_PEERS, num_params, codec),
        )
        for member in range(_NUM_PEERS)
    ]
    try:
        for peer in peers:
            peer.wait_until_up()
        founder, *others = peers
        (founded,) = ask_all([founder], "join", within=_WITHIN, initial_peers=[])
        ask_all(others, "join", within=_WITHIN, initial_peers=[founded["address"]])
        ask_all(peers, "meet", within=_WITHIN)
        yield peers
    finally:
        end_all(peers)


def compare(num_params: int, *, codec: str, num_steps: int) -> dict[str, object]:
    """Return the result line, without its provenance."""
    small = measure(_NEXT_TO_NONE, codec=codec, num_steps=num_steps)
    large = measure(num_params, codec=codec, num_steps=num_steps)

    def per_param(with_model: int, without: int) -> float:
        return round((with_model - without) / (num_params - _NEXT_TO_NONE), 2)

    return {
        "benchmark": "averaging_memory",
        "peers": _NUM_PEERS,
        "params": num_params,
        "codec": codec,
        "steps": num_steps,
        "joined_bytes_per_param": per_param(large.joined, small.joined),
        "peak_bytes_per_param": per_param(large.peak, small.peak),
        "rest_bytes_per_param": per_param(large.rest, small.rest),
        "fixed_rest_mib": round(small.rest / _MIB),
        "fixed_peak_mib": round(small.peak / _MIB),
        "rest_mib": round(large.rest / _MIB),
        "peak_mib": round(large.peak / _MIB),
        "digests_equal": small.is_exact and large.is_exact,
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=int, default=25_000_000)
    parser.add_argument("--codec", choices=sorted(CODECS), default="fp16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the line to it, too")
    arguments = parser.parse_args()
    result = compare(arguments.params, codec=arguments.codec, num_steps=arguments.steps)
    command = " ".join(["python -m", *sys.orig_argv[2:]])
    line = json.dumps(result | provenance() | {"command": command}) + "\n"
    sys.stdout.write(line)
    if arguments.json:
        with arguments.json.open("a") as file:
            file.write(line)


if __name__ == "__main__":
    main()
