"""What came of the demo: the numbers, honestly, and whether it worked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from opendiloco.events import Event
from peers.console import count
from peers.demo.follow import PeerStory

_FEW = 3  # inner steps at an end of a curve that are averaged, to see past one batch's luck
_ROUNDING = 1e-3  # differences below are what rounding makes of the same average


@dataclass(frozen=True)
class DemoReport:
    """The outcome, as `--json` gives it.

    Attributes:
        peers: Peers at the start.
        outer_steps: Outer steps that the swarm has committed.
        loss_first: Mean loss of the first inner steps, nats per token.
        loss_last: Mean loss of the last inner steps of the surviving peers.
        unigram_loss: Loss of the token frequencies alone: what must be beaten.
        tokens: Tokens that the whole swarm has trained on.
        contributions: Rounds and tokens of each peer, by name.
        identical: Whether all surviving peers ended with the same bytes.
        digest: Of all surviving peers, if it is one.
        largest_difference: Between two surviving peers' parameters; None when they cannot be compared.
        utilization: Share of the time that surviving peers spent in inner steps.
        killed: Name of the peer that was killed.
        joined: Name of the peer that joined with the swarm's state.
        joined_at: Outer step of that state.
        seconds: Wall time.
        out_dir: Folder with all files.
        problems: What went wrong, in words; empty if the demo worked.
    """

    peers: int
    outer_steps: int
    loss_first: float | None
    loss_last: float | None
    unigram_loss: float
    tokens: int
    contributions: dict[str, dict[str, int]]
    identical: bool
    digest: str | None
    largest_difference: float | None
    utilization: float | None
    killed: str | None
    joined: str | None
    joined_at: int | None
    seconds: float
    out_dir: str
    problems: list[str]


def make_report(
    survivors: Sequence[PeerStory],
    *,
    killed: PeerStory | None,
    newcomer: PeerStory | None,
    outer_steps: int,
    unigram_loss: float,
    seconds: float,
    folder: Path,
) -> DemoReport:
    """Sum the demo up.

    Args:
        survivors: All peers that were not killed.
        killed: The one that was, if any.
        newcomer: The survivor that was to join midway, if any.
        outer_steps: How many each peer was to reach.
        unigram_loss: Loss of the token frequencies alone.
        seconds: Wall time.
        folder: Of the demo, with the peers' folders.
    """
    everybody = [*survivors, *([killed] if killed else [])]
    digests = {str(left.get("digest")) for left in _left_events(survivors)}
    identical = len(digests) == 1 and all(story.left for story in survivors)
    joined = newcomer.joined if newcomer and _from_swarm(newcomer) else None
    return DemoReport(
        peers=len(everybody) - (newcomer is not None),
        outer_steps=max(story.outer_step for story in survivors),
        loss_first=_mean(
            [
                point.loss
                for story in everybody
                if story is not newcomer
                for point in story.curve[:_FEW]
            ]
        ),
        loss_last=_mean([point.loss for story in survivors for point in story.curve[-_FEW:]]),
        unigram_loss=unigram_loss,
        tokens=max(story.swarm_tokens for story in survivors),
        contributions={
            story.name: {"rounds": story.num_rounds, "tokens": story.num_tokens}
            for story in sorted(everybody, key=lambda story: story.name)
        },
        identical=identical,
        digest=digests.pop() if identical else None,
        largest_difference=largest_difference([folder / story.name for story in survivors]),
        utilization=_mean([float(left["utilization"] or 0) for left in _left_events(survivors)]),
        killed=killed.name if killed else None,
        joined=newcomer.name if newcomer and joined else None,
        joined_at=int(joined["outer_step"] or 0) if joined else None,
        seconds=seconds,
        out_dir=str(folder),
        problems=find_problems(survivors, newcomer=newcomer, outer_steps=outer_steps),
    )


def find_problems(
    survivors: Sequence[PeerStory], *, newcomer: PeerStory | None, outer_steps: int
) -> list[str]:
    """Return in words what did not go as a demo should; see `make_report`."""
    problems = [
        f"{story.name} ended at outer step {story.outer_step} of {outer_steps}"
        for story in survivors
        if story.left is None or story.outer_step < outer_steps
    ]
    if newcomer is not None and not _from_swarm(newcomer):
        problems.append(f"{newcomer.name} did not get the state of the swarm")
    elif newcomer is not None and not newcomer.num_shared:
        problems.append(
            f"{newcomer.name} came too late to take part in a round; "
            "raise --outer-steps or --inner-steps"
        )
    return problems


def largest_difference(folders: Sequence[Path]) -> float | None:
    """Return the largest absolute difference between the parameters of any two peers.

    Args:
        folders: Of the peers; their models are in `model/model.safetensors`.

    Returns:
        0.0 for one peer; None if a model is missing, has other parameters than the rest, or
        values that are not finite.
    """
    from safetensors.numpy import load_file

    paths = [folder / "model" / "model.safetensors" for folder in folders]
    if not all(path.exists() for path in paths):
        return None
    models: list[Mapping[str, npt.NDArray[np.float32]]] = [load_file(path) for path in paths]
    shapes = [{name: array.shape for name, array in model.items()} for model in models]
    if any(other != shapes[0] for other in shapes):
        return None
    largest = 0.0
    for name in models[0]:
        stacked = np.stack([model[name] for model in models])
        difference = float((stacked.max(axis=0) - stacked.min(axis=0)).max())
        if not math.isfinite(difference):
            return None
        largest = max(largest, difference)
    return largest


def summary(report: DemoReport, *, picture: Path) -> str:
    """Return the report as aligned lines for people.

    Args:
        report: What came of the demo.
        picture: Picture of the loss.
    """
    rows = [
        ("loss", _loss_row(report)),
        ("outer steps", str(report.outer_steps)),
        ("tokens", count(report.tokens)),
        *_contribution_rows(report),
        ("killed", report.killed or "nobody"),
        ("joined", _joined_row(report)),
        ("replicas", _replicas_row(report)),
        ("computing", _percent(report.utilization)),
        ("wall time", f"{report.seconds:.0f} s"),
        ("loss curve", str(picture)),
        ("events", f"{report.out_dir}/*/events.jsonl"),
    ]
    return "\n".join(f"{name:<12}  {text}" for name, text in rows)


def _loss_row(report: DemoReport) -> str:
    if report.loss_first is None or report.loss_last is None:
        return "not known: no inner step was finite"
    verdict = "below" if report.loss_last < report.unigram_loss else "NOT below"
    return (
        f"{report.loss_first:.3f} -> {report.loss_last:.3f} nats per byte, {verdict} the "
        f"{report.unigram_loss:.3f} of knowing only how frequent each byte is"
    )


def _contribution_rows(report: DemoReport) -> list[tuple[str, str]]:
    return [
        (
            "" if index else "contributed",
            f"{name}: {given['rounds']} rounds, {count(given['tokens'])} tokens",
        )
        for index, (name, given) in enumerate(report.contributions.items())
    ]


def _joined_row(report: DemoReport) -> str:
    if report.joined is None:
        return "nobody"
    return f"{report.joined}, with the state of the swarm at outer step {report.joined_at}"


def _replicas_row(report: DemoReport) -> str:
    if report.identical:
        return f"identical, digest {str(report.digest)[:16]}"
    if report.largest_difference is None:
        return "not identical; the saved models cannot be compared"
    row = f"not identical: largest difference {report.largest_difference:.1e}"
    if report.largest_difference < _ROUNDING:
        row += "; hivemind's all-reduce rounds each replica differently"
    return row


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.0f} % of the time"


def _left_events(stories: Sequence[PeerStory]) -> list[Event]:
    return [story.left for story in stories if story.left is not None]


def _from_swarm(story: PeerStory) -> bool:
    return story.joined is not None and story.joined["from"] == "swarm"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
