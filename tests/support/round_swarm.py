"""Peers as processes that hold rounds when a test says so, and stand in for those that die."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from tests.support.round_handle import LONGEST_ROUND, SAY_GOODBYE, Event, RoundPeer

_START = 60.0  # seconds for a peer to start, or to join

QUICK: Mapping[str, Mapping[str, object]] = {
    "network": {
        "host": "127.0.0.1",
        "heartbeat_s": 0.5,
        "peer_timeout_s": 2.5,
        "join_timeout_s": 60.0,
    },
    "averaging": {
        "codec": "fp16",
        "wait_s": 10.0,
        "matchmaking_s": 2.0,
        "stall_timeout_s": 4.0,
        "exchange_timeout_s": 30.0,
        "attempts": 3,
    },
}
"""Settings with which a fault costs seconds."""


class Phase(Protocol):
    """One phase of a round."""

    @property
    def value(self) -> str:
        """Its name."""
        ...


class Strike(Protocol):
    """Something that happens to a peer in one phase of a round."""

    @property
    def when(self) -> Phase:
        """The phase."""
        ...

    def strike(self, victim: RoundPeer) -> None:
        """Do it."""
        ...


@dataclass
class Round:
    """What the members of one round said.

    Attributes:
        trained: What they contributed, by member.
        ended: What came of it.
        before: Their state before it.
    """

    before: Event
    trained: dict[int, Event] = field(default_factory=dict)
    ended: dict[int, Event] = field(default_factory=dict)


class RoundSwarm:
    """Four peers, whoever of them dies.

    Attributes:
        peers: By member.
    """

    def __init__(
        self,
        folder: Path,
        *,
        size: int,
        config: Mapping[str, Mapping[str, object]] = QUICK,
        launchers: Mapping[int, Sequence[str]] | None = None,
        hosts: Mapping[int, str] | None = None,
        count: int = 4,
    ) -> None:
        self._folder = folder
        self._size = size
        self._config = config
        self._launchers = launchers or {}
        self._hosts = hosts or {}
        self._num_started = 0
        self._count = count
        self.peers: dict[int, RoundPeer] = {}
        self._history: set[tuple[int, str]] = set()

    def settle(self) -> None:
        """Return with all members alive and in one state; replaces those that are not."""
        states = Counter(
            (peer.state["outer_step"], peer.state["digest"])
            for peer in self.peers.values()
            if peer.is_fit
        )
        best = max(states, key=lambda state: (states[state], state), default=None)
        staying = {
            member: peer
            for member, peer in self.peers.items()
            if peer.is_fit and (peer.state["outer_step"], peer.state["digest"]) == best
        }
        for member in self.peers.keys() - staying.keys():
            self.peers.pop(member).end()
        newcomers = [self._start(member) for member in range(self._count) if member not in staying]
        for peer in newcomers:
            peer.wait_for("imported", within=_START)
        self._join(newcomers, [peer.address for peer in staying.values()])
        for peer in self.peers.values():
            peer.order("meet", num_peers=self._count)
        for peer in self.peers.values():
            peer.wait_for("met", within=_START)

    def hold_round(
        self,
        among: Sequence[int] | None = None,
        *,
        strike: Strike | None = None,
        victim: int | None = None,
        ends_for: Sequence[int] | None = None,
    ) -> Round:
        """Let members train and average.

        Args:
            among: Who takes part; everybody if None.
            strike: What happens in the middle of it.
            victim: To whom, and who halts for it.
            ends_for: Whose end to wait for; that of all who take part if None.
        """
        members = sorted(self.peers) if among is None else among
        held = Round(before=self.peers[members[0]].state)
        for member in members:
            halt_at = strike.when.value if strike and member == victim else None
            self.peers[member].order("round", halt_at=halt_at)
        for member in members:
            held.trained[member] = self.peers[member].wait_for("trained", within=LONGEST_ROUND)
        if strike is not None and victim is not None:
            self.peers[victim].wait_until_it_halts(strike.when.value)
            strike.strike(self.peers[victim])
            self.peers[victim].go_on()
        self.wait_for_ends(held, members if ends_for is None else ends_for)
        return held

    def wait_for_ends(self, held: Round, members: Iterable[int]) -> None:
        """Wait until the round is over for these members."""
        for member in members:
            ended = self.peers[member].wait_for("ended", within=LONGEST_ROUND)
            held.ended[member] = ended
            self._history.add((ended["outer_step"], ended["digest"]))

    def knows(self, event: Event) -> bool:
        """Return whether a member has a state that others ended a round with."""
        return (event["outer_step"], event["digest"]) in self._history

    def condemn(self, member: int) -> None:
        """Kill a member with all its processes; :meth:`settle` starts another in its place."""
        self.peers[member].is_condemned = True
        for process in (
            self.peers[member].tree() if self.peers[member].process.poll() is None else []
        ):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.peers[member].process.wait(SAY_GOODBYE)

    def close(self) -> None:
        """End all members."""
        for peer in self.peers.values():
            peer.end()

    def _start(self, member: int) -> RoundPeer:
        self._num_started += 1
        groups: dict[str, object] = {name: dict(group) for name, group in self._config.items()}
        if member in self._hosts:
            groups["network"] = {**self._config["network"], "host": self._hosts[member]}
        peer = RoundPeer(
            member,
            self._folder / f"{member}-{self._num_started}",
            size=self._size,
            config=groups,
            launcher=self._launchers.get(member, ()),
        )
        self.peers[member] = peer
        return peer

    @staticmethod
    def _join(newcomers: Sequence[RoundPeer], addresses: Sequence[str]) -> None:
        """Let peers join by these addresses, or by the first one of them, which founds a swarm."""
        joining = list(newcomers)
        if joining and not addresses:
            founder = joining.pop(0)
            founder.order("join", initial_peers=[])
            founder.wait_for("ready", within=_START)
            addresses = [founder.address]
        for peer in joining:
            peer.order("join", initial_peers=list(addresses))
        for peer in joining:
            peer.wait_for("ready", within=_START)
