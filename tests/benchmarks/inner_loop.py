"""What this project's inner loop costs over a bare PyTorch loop, in one run.

Both train the same model with the same optimizer, batch size and number of threads. Ours
reads its data from the token cache, follows the learning-rate schedule and logs; the bare
loop gets one batch that lies ready. They take turns, a few steps each, so that what else
the machine does hits both alike; the figure is the median of the pairs' ratios.

    python -m tests.benchmarks.inner_loop --preset 14m --pairs 30
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch.nn import functional

from opendiloco.events import EventLog
from peers.batches import Batches
from peers.config import InnerConfig
from peers.data import build_token_cache
from peers.inner import InnerReport, InnerTrainer
from peers.model import build_model, load_model_config
from peers.parallel import Replica
from peers.tokenizer import load_tokenizer

SEQ_LEN, STEPS = 256, 3


class Ours:
    """The inner loop as a peer runs it, with its log."""

    def __init__(self, model: torch.nn.Module, batches: Batches, log: EventLog) -> None:
        self._until = threading.Event()
        self._step = 0
        self._log = log
        self._trainer = InnerTrainer(
            Replica(model, torch.device("cpu")),
            batches,
            InnerConfig(batch_size=8, micro_batch_size=4),
            log_every=STEPS,
            on_log=self._on_log,
        )

    def run(self) -> None:
        """Take STEPS inner steps."""
        self._trainer.run(STEPS, first_step=self._step, until=self._until)
        self._step += STEPS

    def _on_log(self, report: InnerReport, step: int) -> None:
        self._log.emit("inner", inner_step=step, loss=report.loss, lr=report.lr)


class Bare:
    """What a user would write by hand."""

    def __init__(self, model: torch.nn.Module, batch: torch.Tensor) -> None:
        self._model = model.train()
        self._batch = batch
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1
        )

    def run(self) -> None:
        """Take STEPS inner steps."""
        for _ in range(STEPS):
            for _ in range(2):
                logits = self._model(input_ids=self._batch[:, :-1]).logits
                loss = functional.cross_entropy(
                    logits.flatten(0, 1).float(), self._batch[:, 1:].flatten()
                )
                (loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


def _seconds(loop: Ours | Bare) -> float:
    began_at = time.perf_counter()
    loop.run()
    return time.perf_counter() - began_at


def measure(preset: str, num_pairs: int) -> dict[str, object]:
    """Return the medians of both loops and of their ratio."""
    tokenizer = load_tokenizer("bytes")
    config = load_model_config(preset, None, vocab_size=tokenizer.vocab_size, seq_len=SEQ_LEN)
    with tempfile.TemporaryDirectory() as folder:
        text = build_token_cache(["stdlib"], tokenizer, Path(folder) / "cache")
        batches = Batches(text.tokens, seq_len=SEQ_LEN, seed=1, peer_key="bench")
        log = EventLog(Path(folder) / "events.jsonl")
        ours = Ours(build_model(config, seed=1), batches, log)
        bare = Bare(build_model(config, seed=1), batches.batch(0, 4))
        for loop in (ours, bare):
            loop.run()
        pairs = []
        for index in range(num_pairs):
            if index % 2:
                b, a = _seconds(bare), _seconds(ours)
            else:
                a, b = _seconds(ours), _seconds(bare)
            pairs.append((a, b))
        log.close()
    return {
        "benchmark": "inner_loop",
        "preset": preset,
        "pairs": num_pairs,
        "threads": torch.get_num_threads(),
        "ours_s_per_step": round(statistics.median(a for a, _ in pairs) / STEPS, 4),
        "bare_s_per_step": round(statistics.median(b for _, b in pairs) / STEPS, 4),
        "ratio": round(statistics.median(a / b for a, b in pairs), 4),
    }


def main() -> None:
    """Print one JSON line, with the commit and the command that made it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="14m")
    parser.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607 - whichever git there is
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    result = measure(arguments.preset, arguments.pairs)
    result |= {"commit": commit, "command": " ".join(["python -m", *sys.orig_argv[2:]])}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
