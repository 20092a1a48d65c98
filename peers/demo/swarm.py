"""The course of the demo: a bootstrap, some peers, one killed midway, a new one in its place."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from opendiloco.errors import OpenDiLoCoError
from opendiloco.events import EventLog
from opendiloco.units import Seconds
from peers.demo.children import Child, Children
from peers.demo.follow import EventTail, PeerStory, committed, happening
from peers.demo.settings import DemoConfig, bootstrap_arguments, num_threads, peer_arguments

_LOOK = Seconds(0.2)
_SILENCE = Seconds(180.0)  # longer than any wait between two events of a healthy swarm
_JOIN_LINE = re.compile(r"^.*--initial-peers (\S+).*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Peer:
    child: Child
    tail: EventTail
    story: PeerStory


class DemoSwarm:
    """Runs the demo from the first process to the last peer's leaving.

    What it does next follows from the peers' events and processes only.

    Attributes:
        killed: The peer that was killed, once it was.
        newcomer: The peer that came in its place, once it was started.
    """

    def __init__(
        self,
        config: DemoConfig,
        folder: Path,
        children: Children,
        *,
        cache_dir: Path,
        log: EventLog,
        say: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            config: Of the demo.
            folder: Receives one folder per process.
            children: Starts the processes.
            cache_dir: Where the tokens are.
            log: Receives what the demo itself does.
            say: Receives what happens, in words.
        """
        self._config = config
        self._folder = folder
        self._children = children
        self._cache_dir = cache_dir
        self._log = log
        self._say = say
        self._peers: list[_Peer] = []
        self._bootstrap: Child | None = None
        self._address = ""
        self._outer_step = 0
        self._began_at = self._heard_at = time.monotonic()
        self.killed: PeerStory | None = None
        self.newcomer: PeerStory | None = None

    @property
    def stories(self) -> list[PeerStory]:
        """What each peer has done so far, in the order in which they came."""
        return [peer.story for peer in self._peers]

    @property
    def survivors(self) -> list[PeerStory]:
        """Those that were not killed."""
        return [story for story in self.stories if story is not self.killed]

    @property
    def outer_step(self) -> int:
        """The latest that a peer has committed."""
        return self._outer_step

    def run(self, show: Callable[[], None]) -> None:
        """Run until all peers have left.

        Args:
            show: Called after every look at the peers.

        Raises:
            ChildEndedError: If a process ended that should not have.
            OpenDiLoCoError: If nothing happens for too long, or the peers were too fast.
        """
        self._start_bootstrap(show)
        for _ in range(self._config.peers):
            self._start_peer(min_peers=self._config.peers)
        while True:
            # In this order: what a process wrote before its end is read before it counts.
            all_ended = not any(peer.child.is_running for peer in self._peers)
            self._follow()
            self._check()
            if self._is_time_to_kill():
                self._replace_a_peer()
            elif all_ended:
                return
            show()
            time.sleep(_LOOK)

    def _start_bootstrap(self, show: Callable[[], None]) -> None:
        folder = self._folder / "bootstrap"
        arguments = bootstrap_arguments(folder)
        self._bootstrap = self._children.start("bootstrap", folder, arguments, num_threads=1)
        while not (line := _JOIN_LINE.search(self._bootstrap.log)):
            self._check()
            show()
            time.sleep(_LOOK)
        self._address = line[1]
        self._say(f"bootstrap is at {self._address}")

    def _start_peer(self, *, min_peers: int) -> _Peer:
        name = f"peer-{len(self._peers) + 1}"
        folder = self._folder / name
        arguments = peer_arguments(
            self._config,
            folder,
            address=self._address,
            cache_dir=self._cache_dir,
            min_peers=min_peers,
        )
        threads = num_threads(self._config.peers)
        child = self._children.start(name, folder, arguments, num_threads=threads)
        peer = _Peer(child, EventTail(folder / "events.jsonl"), PeerStory(name))
        self._peers.append(peer)
        self._log.emit("peer_started", name=name, pid=child.process.pid)
        self._say(f"{name} starts, process {child.process.pid}")
        return peer

    def _follow(self) -> None:
        for peer in self._peers:
            for event in peer.tail.read():
                self._heard_at = time.monotonic()
                peer.story.take(event, steps_per_round=self._config.inner_steps)
                if text := happening(peer.story, event):
                    self._say(text)
                is_commit = event["event"] == "outer_step" and event["verdict"] == "committed"
                if is_commit and peer.story.outer_step > self._outer_step:
                    self._outer_step = peer.story.outer_step
                    self._say(committed(peer.story, event))

    def _check(self) -> None:
        """Raise if a process has ended that should not have, or nothing happens any more."""
        if self._bootstrap is not None:
            self._bootstrap.refuse_end(codes=())
        for peer in self._peers:
            if peer.story is not self.killed:
                peer.child.refuse_end(codes=(0,))
        moment = time.monotonic()
        if moment - self._heard_at > _SILENCE:
            self._give_up(f"nothing has happened for {_SILENCE:g} s")
        if moment - self._began_at > (longest := self._config.longest_s):
            self._give_up(f"not done after {longest:g} s")

    def _give_up(self, why: str) -> NoReturn:
        states = ", ".join(f"{story.name} is {story.state}" for story in self.stories)
        raise OpenDiLoCoError(
            f"{why} ({states or 'the bootstrap starts'}); the logs are in {self._folder}"
        )

    def _is_time_to_kill(self) -> bool:
        return (
            self._config.replaces_a_peer
            and self.killed is None
            and self._outer_step >= self._config.kill_after
        )

    def _replace_a_peer(self) -> None:
        victim = self._peers[-1]
        if not victim.child.is_running:
            raise OpenDiLoCoError(
                "training was over before a peer could be killed; raise --inner-steps"
            )
        victim.child.process.kill()
        victim.child.process.wait()
        self._follow()
        self.killed = victim.story
        self.killed.state = "killed"
        self.killed.tokens_per_second = 0.0
        self._log.emit(
            "killed",
            name=self.killed.name,
            pid=victim.child.process.pid,
            outer_step=self.killed.outer_step,
            inner_step=self.killed.inner_step,
        )
        self._say(f"{self.killed.name} killed (SIGKILL), at inner step {self.killed.inner_step}")
        self.newcomer = self._start_peer(min_peers=1).story
