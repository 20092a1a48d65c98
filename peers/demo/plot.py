"""The demo's loss curve as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.demo.follow import PeerStory


def draw_loss(
    stories: Sequence[PeerStory],
    path: Path,
    *,
    unigram_loss: float,
    killed: PeerStory | None,
    newcomer: PeerStory | None,
) -> None:
    """Draw the loss of every peer over the swarm's inner steps, as a PNG.

    Args:
        stories: The peers.
        path: Where to.
        unigram_loss: Drawn as the line to beat.
        killed: Its end is marked.
        newcomer: Its begin is marked.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), dpi=120)
    colours = plt.get_cmap("tab10" if len(stories) <= 10 else "tab20")
    for index, story in enumerate(stories):
        steps = [point.inner_step for point in story.curve]
        losses = [point.loss for point in story.curve]
        axes.plot(steps, losses, label=story.name, color=colours(index), linewidth=1.4, alpha=0.85)
    axes.axhline(unigram_loss, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"knowing only how frequent each byte is: {unigram_loss:.2f}",
        (1.0, unigram_loss),
        xycoords=("axes fraction", "data"),
        xytext=(-6, 4),
        textcoords="offset points",
        ha="right",
    )
    if killed is not None and killed.curve:
        _mark(axes, killed.curve[-1].inner_step, f"{killed.name} killed ", align="right")
    if newcomer is not None and newcomer.curve:
        _mark(axes, newcomer.curve[0].inner_step, f" {newcomer.name} joined", align="left")
    axes.set_xlabel("inner step of the swarm")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("Loss of every peer")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _mark(axes: Any, inner_step: int, text: str, *, align: str) -> None:  # noqa: ANN401
    """Draw a vertical line, with a text that ends ("right") or begins ("left") there."""
    axes.axvline(inner_step, color="grey", linestyle=":", linewidth=1)
    axes.annotate(text, (inner_step, 0.92), xycoords=("data", "axes fraction"), ha=align)
