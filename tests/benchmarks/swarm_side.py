"""A benchmark peer's side of the swarm, opened in the order in which a real peer opens it."""

import contextlib
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from opendiloco.averaging.options import AveragingOptions
from opendiloco.averaging.swarm import HivemindAverager
from opendiloco.dht import NetworkOptions, SwarmDHT
from opendiloco.identity import load_or_create_identity
from opendiloco.progress.records import PeerRecord
from opendiloco.progress.tracker import ProgressTracker
from opendiloco.units import Seconds

RUN_ID = "benchmark"

ROUND_LIMIT = Seconds(600.0)
"""Time that a round may take."""


def start_dht(address: str, initial_peers: Sequence[str], stack: contextlib.ExitStack) -> SwarmDHT:
    """Found a swarm, or join one; the stack leaves it.

    Args:
        address: Where to listen.
        initial_peers: Whom to join; nobody to found a swarm.
        stack: Ends what is started here.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    options = NetworkOptions(
        host=address, initial_peers=tuple(initial_peers), join_timeout=Seconds(60.0)
    )
    identity = load_or_create_identity(folder / "identity.key")
    return stack.enter_context(SwarmDHT.start(options, identity, on_retry=_complain))


def start_averager(
    dht: SwarmDHT,
    num_elements: int,
    stack: contextlib.ExitStack,
    *,
    codec: str,
    matchmaking: Seconds,
) -> tuple[HivemindAverager, ProgressTracker]:
    """Start the averager and publish that this peer trains; the stack ends both.

    Args:
        dht: The swarm.
        num_elements: Of the one fragment.
        stack: Ends what is started here.
        codec: On the wire.
        matchmaking: Patience for late peers.
    """
    record = PeerRecord(peer_id=dht.peer_id, fingerprint="-", state="training")
    tracker = ProgressTracker(
        dht, record, run_id=RUN_ID, heartbeat=Seconds(1.0), max_age=Seconds(30.0)
    )
    options = AveragingOptions(
        codec=codec, matchmaking=matchmaking, exchange=ROUND_LIMIT, attempts=1
    )
    averager = HivemindAverager(
        dht.dht,
        [num_elements],
        tracker,
        run_key=RUN_ID,
        options=options,
        leaving=threading.Event(),
    )
    stack.callback(averager.close)
    tracker.start()
    stack.callback(tracker.close)
    return averager, tracker


def meet_others(tracker: ProgressTracker, num_others: int) -> None:
    """Return when so many other peers can be seen."""
    while len(tracker.view().peers) < num_others:
        tracker.refresh(Seconds(1.0))


def _complain(line: str) -> None:
    sys.stderr.write(f"{line}\n")
