"""Some peers' network sides in one process, over real p2pd and hivemind on loopback."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from opendiloco.averaging.group import Role
from opendiloco.averaging.options import AveragingOptions
from opendiloco.averaging.swarm import HivemindAverager
from opendiloco.dht import NetworkOptions, SwarmDHT
from opendiloco.identity import load_or_create_identity
from opendiloco.progress.records import PeerRecord
from opendiloco.progress.tracker import ProgressTracker
from opendiloco.units import Seconds

RUN_ID = "test"


def wait_until(condition: Callable[[], bool], what: str, *, within: float = 20.0) -> None:
    """Poll until the condition holds; fails the test by naming what did not happen."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what}")
        time.sleep(0.02)


@dataclass
class Node:
    """One peer's DHT, records and, if asked for, averager."""

    dht: SwarmDHT
    tracker: ProgressTracker
    averager: HivemindAverager | None = None

    @property
    def peer_id(self) -> str:
        return self.dht.peer_id


@contextmanager
def nodes(
    count: int,
    folder: Path,
    *,
    fragment_sizes: Sequence[int] | None = None,
    codec: str = "none",
    patience: float = 3.0,
    roles: Sequence[Role] | None = None,
) -> Iterator[list[Node]]:
    """Start peers that know each other; ends them all.

    Averagers are made only with ``fragment_sizes``. ``patience`` is that of matchmaking, in
    seconds. All are full members if no ``roles`` are given; the first cannot be a client.
    """
    roles = roles or [Role.FULL] * count
    with ExitStack() as stack:
        made: list[Node] = []
        leaving = threading.Event()
        stack.callback(leaving.set)
        for index in range(count):
            options = NetworkOptions(
                host="127.0.0.1",
                initial_peers=tuple(made[0].dht.addresses()[:1]) if made else (),
                client_mode=roles[index] is Role.CLIENT,
                join_timeout=Seconds(30.0),
            )
            identity = load_or_create_identity(folder / f"{index}.key")
            dht = stack.enter_context(SwarmDHT.start(options, identity, on_retry=lambda _: None))
            record = PeerRecord(
                peer_id=dht.peer_id,
                name=f"node-{index}",
                fingerprint="f",
                state="training",
                client_mode=roles[index] is Role.CLIENT,
            )
            tracker = ProgressTracker(
                dht, record, run_id=RUN_ID, heartbeat=Seconds(1.0), max_age=Seconds(5.0)
            )
            made.append(Node(dht, tracker))
        if fragment_sizes is not None:
            for node, role in zip(made, roles, strict=True):
                node.averager = HivemindAverager(
                    node.dht.dht,
                    fragment_sizes,
                    node.tracker,
                    run_key=f"{RUN_ID}-f",
                    options=AveragingOptions(
                        codec=codec,
                        auxiliary=role is Role.AUXILIARY,
                        matchmaking=Seconds(patience),
                    ),
                    leaving=leaving,
                )
                stack.callback(node.averager.close)
        for node in made:
            node.tracker.start()
            stack.callback(node.tracker.close)
        wait_until(lambda: _all_see(made, count - 1), "every node sees all others")
        yield made


def _all_see(made: Sequence[Node], num_others: int) -> bool:
    for node in made:
        node.tracker.refresh(Seconds(1.0))
    return all(len(node.tracker.view().peers) == num_others for node in made)
