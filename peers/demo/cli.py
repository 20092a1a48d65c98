"""The command `opendiloco demo`: see it work on this machine, in about two minutes."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from opendiloco.errors import ConfigError, OpenDiLoCoError
from opendiloco.events import EventLog
from opendiloco.settings import load_settings, run_command
from opendiloco.units import Seconds
from peers.config import DataConfig
from peers.data import build_token_cache
from peers.demo.children import ChildEndedError, children
from peers.demo.plot import draw_loss
from peers.demo.report import make_report, summary
from peers.demo.screen import Screen
from peers.demo.settings import DemoConfig
from peers.demo.swarm import DemoSwarm
from peers.tokenizer import load_tokenizer

PROG = "opendiloco demo"

_GRACE = Seconds(8.0)


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code, 0 only if everything went as it should."""
    return run_command(_main, argv, prog=PROG)


def _main(argv: Sequence[str]) -> int:
    config = load_settings(DemoConfig, argv, prog=PROG)
    folder = _fresh_folder(config.out_dir)
    try:
        _run(config, folder)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; all processes of the demo have ended\n")
        raise
    return 0


def _fresh_folder(wanted: Path | None) -> Path:
    """Return the absolute path of a folder for this demo alone.

    Raises:
        ConfigError: If it holds another demo's events, or cannot be made.
    """
    stamp = datetime.now(UTC).astimezone().strftime("%Y%m%d-%H%M%S")
    folder = (wanted or Path("runs") / f"demo-{stamp}").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.glob("events.jsonl")) or any(folder.glob("*/events.jsonl"))
    except OSError as error:
        raise ConfigError(
            f"--out-dir: cannot use {folder}: {error.strerror}; choose another folder"
        ) from None
    if taken:
        raise ConfigError(
            f"--out-dir: {folder} holds the events of another run; choose another folder"
        )
    return folder


def _run(config: DemoConfig, folder: Path) -> None:
    """Run the demo and report.

    Raises:
        OpenDiLoCoError: If it did not go as it should.
    """
    began_at = time.monotonic()
    unigram_loss, cache_dir = _prepare_text(folder)
    console = Console(stderr=config.json)
    screen = Screen(console, num_outer_steps=config.outer_steps, unigram_loss=unigram_loss)
    log = EventLog(folder / "events.jsonl")
    log.emit("demo_started", peers=config.peers, unigram_loss=unigram_loss)
    try:
        with children(_GRACE) as started, screen:
            swarm = DemoSwarm(config, folder, started, cache_dir=cache_dir, log=log, say=screen.say)
            swarm.run(lambda: screen.show(swarm))
    except ChildEndedError as error:
        sys.stderr.write(error.log_tail + "\n")
        raise
    finally:
        log.close()
    report = make_report(
        swarm.survivors,
        killed=swarm.killed,
        newcomer=swarm.newcomer,
        outer_steps=config.outer_steps,
        unigram_loss=unigram_loss,
        seconds=time.monotonic() - began_at,
        folder=folder,
    )
    picture = folder / "loss.png"
    draw_loss(
        swarm.stories,
        picture,
        unigram_loss=unigram_loss,
        killed=swarm.killed,
        newcomer=swarm.newcomer,
    )
    console.file.write("\n" + summary(report, picture=picture) + "\n")
    if config.json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
    if report.problems:
        raise OpenDiLoCoError("; ".join(report.problems))


def _prepare_text(folder: Path) -> tuple[float, Path]:
    """Tokenise what the peers will train on, so that they find it done.

    Returns:
        The loss of the byte frequencies alone, and the cache's folder: the usual one, or
        one in the demo's folder where that cannot be written.
    """
    config = DataConfig()
    tokenizer = load_tokenizer(config.tokenizer)
    cache_dir = config.cache_dir
    try:
        text = build_token_cache(config.sources, tokenizer, cache_dir)
    except ConfigError:
        cache_dir = folder / "cache"
        text = build_token_cache(config.sources, tokenizer, cache_dir)
    return text.unigram_entropy(), cache_dir
