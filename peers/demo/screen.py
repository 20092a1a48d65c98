"""What a person sees while the demo runs: a live table, or plain lines where there is no terminal."""

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peers.console import count
from peers.demo.follow import PeerStory

if TYPE_CHECKING:
    from peers.demo.swarm import DemoSwarm

_NUM_HAPPENINGS = 8
_COLOURS = {"training": "green", "averaging": "cyan", "killed": "red", "left": "dim"}


class Screen:
    """Shows the demo; as a context manager it leaves the terminal in order.

    On a terminal it is a table with the last happenings below it, drawn in place; otherwise
    every happening is a line.
    """

    def __init__(self, console: Console, *, num_outer_steps: int, unigram_loss: float) -> None:
        """Prepare.

        Args:
            console: Where to write.
            num_outer_steps: How many there will be.
            unigram_loss: The loss to beat, nats per token.
        """
        self._console = console
        self._num_outer_steps = num_outer_steps
        self._unigram_loss = unigram_loss
        self._began_at = time.monotonic()
        self._happenings: deque[str] = deque(maxlen=_NUM_HAPPENINGS)
        self._live = (
            Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Tell that something has happened."""
        line = f"{time.monotonic() - self._began_at:6.1f} s  {text}"
        if self._live is None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._happenings.append(line)

    def show(self, swarm: "DemoSwarm") -> None:
        """Draw the table anew, if there is one."""
        if self._live is None:
            return
        seconds = int(time.monotonic() - self._began_at)
        title = (
            f"outer step {swarm.outer_step} of {self._num_outer_steps}   "
            f"{seconds // 60}:{seconds % 60:02d}   loss to beat {self._unigram_loss:.3f}"
        )
        happenings = [
            Text(line, no_wrap=True, overflow="ellipsis", style="dim") for line in self._happenings
        ]
        table = peer_table(swarm.stories, title=title)
        self._live.update(Group(table, *happenings), refresh=True)


def peer_table(stories: Sequence[PeerStory], *, title: str) -> Table:
    """Return a table with one peer a row.

    Args:
        stories: What is known of the peers.
        title: Stands above it.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("peer")
    table.add_column("state", min_width=9)
    for name in ("outer step", "inner step", "loss", "tokens/s", "tokens"):
        table.add_column(name, justify="right")
    for story in stories:
        table.add_row(
            story.name,
            Text(story.state, style=_COLOURS.get(story.state, "yellow")),
            str(story.outer_step) if story.joined else "",
            str(story.inner_step) if story.curve else "",
            "" if story.loss is None else f"{story.loss:.3f}",
            count(round(story.tokens_per_second)) if story.tokens_per_second else "",
            count(story.num_tokens) if story.num_tokens else "",
        )
    return table
