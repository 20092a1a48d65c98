"""What the demo knows of its peers: read from their event logs, and from nothing else."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from opendiloco.events import Event
from peers.console import count, describe


class EventTail:
    """Reads an event log that is being written; a half line is left for the next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """Return the events written since the last call; none while there is no file."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [event for event in map(_parse, whole.splitlines()) if event is not None]


def _parse(line: bytes) -> Event | None:
    """Return the event of a line; None if a full disk has cut it."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


@dataclass(frozen=True, slots=True)
class LossPoint:
    """A point of the loss curve.

    Attributes:
        inner_step: Of the swarm.
        loss: Nats per token.
    """

    inner_step: int
    loss: float


@dataclass
class PeerStory:
    """One peer's events, summed up.

    Attributes:
        name: What people call it.
        state: starting, joining, training, averaging, left or killed.
        outer_step: After its last committed round.
        inner_step: Of the swarm, at its last inner step.
        tokens_per_second: Its speed now.
        num_tokens: Tokens that it has trained on.
        swarm_tokens: Tokens of the whole swarm, as this peer counts them.
        num_rounds: Rounds that have its inner steps in their result.
        num_shared: Those of them with at least two peers.
        last_round_peers: Peers in the last round.
        curve: Loss at every inner step that it logged.
        joined: The event, once it has joined.
        left: The event, once it has left.
    """

    name: str
    state: str = "starting"
    outer_step: int = 0
    inner_step: int = 0
    tokens_per_second: float = 0.0
    num_tokens: int = 0
    swarm_tokens: int = 0
    num_rounds: int = 0
    num_shared: int = 0
    last_round_peers: int = 1
    curve: list[LossPoint] = field(default_factory=list)
    joined: Event | None = None
    left: Event | None = None

    @property
    def loss(self) -> float | None:
        """Its last loss; None before the first inner step."""
        return self.curve[-1].loss if self.curve else None

    def take(self, event: Event, *, steps_per_round: int) -> None:
        """Take note of an event.

        Args:
            event: The next one of its log.
            steps_per_round: Inner steps after which a round begins.
        """
        match event["event"]:
            case "started":
                self.state = "joining"
            case "joined":
                self.state, self.joined = "training", event
                self.outer_step = _int(event, "outer_step")
            case "inner":
                self._take_inner(event, steps_per_round)
            case "round":
                self.last_round_peers = _int(event, "num_peers")
            case "outer_step":
                self._take_outer_step(event)
            case "left":
                self.state, self.left = "left", event
                self.tokens_per_second = 0.0

    def _take_inner(self, event: Event, steps_per_round: int) -> None:
        self.inner_step = _int(event, "inner_step")
        self.num_tokens += _int(event, "num_tokens")
        self.tokens_per_second = _float(event, "tokens_per_second")
        self.state = "training" if self.inner_step % steps_per_round else "averaging"
        if isinstance(event.get("loss"), float):  # null when it is not finite
            self.curve.append(LossPoint(self.inner_step, _float(event, "loss")))

    def _take_outer_step(self, event: Event) -> None:
        self.state = "training"
        self.outer_step = _int(event, "outer_step")
        self.swarm_tokens = _int(event, "num_tokens")
        if event.get("verdict") == "committed":
            self.num_rounds += 1
            self.num_shared += self.last_round_peers > 1


def happening(story: PeerStory, event: Event) -> str:
    """Return what an event means, in words; an empty string if it is nothing to tell.

    Committed outer steps are not told: all peers commit them.
    """
    match event["event"], event.get("outcome"), event.get("from"):
        case "joined", _, "swarm":
            size = _float(event, "bytes") / 2**20
            return (
                f"{story.name} joined at outer step {event['outer_step']} with the state of the "
                f"swarm, {size:.1f} MiB"
            )
        case "joined", _, _:
            return f"{story.name} joined with the parameters of the seed"
        case ("round", "failed", _) | ("behind", _, _):
            return f"{story.name}: {describe(event)}"
        case "left", _, _:
            return f"{story.name} left at outer step {event['outer_step']}"
    return ""


def committed(story: PeerStory, event: Event) -> str:
    """Return in words the outer step that this peer has just committed."""
    who = f"{story.last_round_peers} peers averaged" if story.last_round_peers > 1 else "1 peer"
    loss = f", loss {_float(event, 'loss'):.3f}" if event.get("loss") is not None else ""
    return f"outer step {story.outer_step}: {who}{loss}, {count(story.swarm_tokens)} tokens"


def _int(event: Event, name: str) -> int:
    value = event.get(name)
    return int(value) if isinstance(value, int | float) else 0


def _float(event: Event, name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
