"""Three hundred rounds with a fault in every tenth: what the survivors hold does not grow.

Takes about ten minutes; runs only where ``OPENDILOCO_LONG_TESTS`` is set.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

import psutil
import pytest

from tests.support.faults import Fault, When, Who
from tests.support.round_checks import assert_one_state
from tests.support.round_handle import LONGEST_ROUND
from tests.support.round_swarm import RoundSwarm

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not os.environ.get("OPENDILOCO_LONG_TESTS"),
        reason="takes ten minutes; set OPENDILOCO_LONG_TESTS=1",
    ),
]

SIZE = 50_000
NUM_ROUNDS = 300
WARM_UP = 60  # rounds
VICTIM = 3
SURVIVORS = [0, 1, 2]
ALLOWED_BYTES = 40 * 2**20  # of a tree of processes of some 600 MiB
ALLOWED_FILES = 24
ALLOWED_SEGMENTS = 8


@dataclass(frozen=True)
class Holdings:
    """What a peer's processes hold.

    Attributes:
        num_bytes: Memory, shared pages counted in shares.
        num_segments: Files of theirs in shared memory.
        num_files: Open files.
    """

    num_bytes: int
    num_segments: int
    num_files: int

    @classmethod
    def of(cls, processes: list[psutil.Process]) -> "Holdings":
        """Measure."""
        segments = Path("/dev/shm").glob("torch_*")
        owners = {f"torch_{process.pid}" for process in processes}
        return cls(
            num_bytes=sum(process.memory_full_info().pss for process in processes),
            num_segments=sum(segment.name.rsplit("_", 2)[0] in owners for segment in segments),
            num_files=sum(process.num_fds() for process in processes),
        )


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[RoundSwarm]:
    made = RoundSwarm(tmp_path, size=SIZE)
    yield made
    made.close()


def hold_round_with(swarm: RoundSwarm, fault: Fault) -> None:
    """Let a fault happen, and put another peer in the place of its victim."""
    held = swarm.hold_round(strike=fault, victim=VICTIM, ends_for=SURVIVORS)
    assert fault.fired
    assert_one_state(held, SURVIVORS)
    if fault.what is signal.SIGSTOP:
        fault.thaw(swarm.peers[VICTIM])
        swarm.peers[VICTIM].wait_for("ended", "lost", within=LONGEST_ROUND)
    else:
        swarm.condemn(VICTIM)
    swarm.settle()


def test_survivors_of_many_faults_hold_no_more_than_before(swarm: RoundSwarm) -> None:
    swarm.settle()
    faults = cycle(product([signal.SIGKILL, signal.SIGSTOP], When))
    before: dict[int, Holdings] = {}

    for number in range(NUM_ROUNDS):
        if number == WARM_UP:
            before = {member: Holdings.of(swarm.peers[member].tree()) for member in SURVIVORS}
        if number % 10 == 9:
            what, when = next(faults)
            hold_round_with(swarm, Fault(what, Who.PEER, when))
        else:
            assert_one_state(swarm.hold_round(), range(4))
    after = {member: Holdings.of(swarm.peers[member].tree()) for member in SURVIVORS}

    for member in SURVIVORS:
        assert after[member].num_bytes < before[member].num_bytes + ALLOWED_BYTES
        assert after[member].num_segments < before[member].num_segments + ALLOWED_SEGMENTS
        assert after[member].num_files < before[member].num_files + ALLOWED_FILES
