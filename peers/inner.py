"""Inner steps: AdamW on this peer's own data, at the learning rate of the swarm."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn import functional

from opendiloco.units import Seconds
from peers.batches import Batches
from peers.config import InnerConfig
from peers.parallel import Replica


@dataclass(frozen=True, slots=True)
class InnerReport:
    """What some inner steps did.

    Attributes:
        num_steps: Optimizer steps taken.
        num_tokens: Tokens trained on.
        loss: Mean cross-entropy in nats per token.
        grad_norm: L2 norm before clipping, mean over the steps.
        lr: Learning rate of the last step.
        duration: Wall time, reading data included.
        stopped: The peer was told to leave before all steps were done.
    """

    num_steps: int
    num_tokens: int
    loss: float
    grad_norm: float
    lr: float
    duration: Seconds
    stopped: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Speed over these steps."""
        return self.num_tokens / self.duration if self.duration > 0 else 0.0


def learning_rate(config: InnerConfig, swarm_step: int) -> float:
    """Return the rate at an inner step of the swarm: linear warm-up, then a cosine.

    A function of the swarm's step and not of the process's age: a joiner takes the rate
    that the others have.

    Args:
        config: Peak rate, warm-up, length, and the share of the peak at the end.
        swarm_step: From 0.
    """
    if swarm_step < config.warmup_steps:
        return config.lr * (swarm_step + 1) / config.warmup_steps
    progress = (swarm_step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


class InnerTrainer:
    """Holds the inner optimizer and the data position across outer steps.

    Attributes:
        seconds: Time spent in inner steps so far.
    """

    def __init__(
        self,
        replica: Replica,
        batches: Batches,
        config: InnerConfig,
        *,
        log_every: int,
        on_log: Callable[[InnerReport, int], None],
    ) -> None:
        """Prepare to train.

        Args:
            replica: The model.
            batches: Gives this peer's sequences by position.
            config: Optimizer, schedule and batch.
            log_every: Inner steps between two calls of ``on_log``.
            on_log: Receives what happened since its last call, and the swarm's inner step.
        """
        self._replica = replica
        self._batches = batches
        self._config = config
        self._log_every = log_every
        self._on_log = on_log
        self._position: int | None = None
        self.seconds = 0.0
        self._since_log = _Meter()
        self._optimizer = self._new_optimizer()

    def run(self, num_steps: int, *, first_step: int, until: threading.Event) -> InnerReport:
        """Take inner steps.

        Args:
            num_steps: How many.
            first_step: The swarm's inner step of the first one; sets the learning rate.
            until: Once set, the step under way is finished and no other begun.
        """
        self._replica.model.train()
        if self._position is None:
            # Where the swarm is: a peer that starts again does not see the same text again.
            self._position = first_step * self._config.batch_size
        report = self._take_steps(num_steps, first_step, until)
        self.seconds += report.duration
        return report

    def _take_steps(self, num_steps: int, first_step: int, until: threading.Event) -> InnerReport:
        whole = _Meter().resume()
        self._since_log.resume()
        for step in range(first_step, first_step + num_steps):
            if until.is_set():
                return whole.report(stopped=True)
            lr = learning_rate(self._config, step)
            loss, grad_norm = self._step(lr)
            for meter in (whole, self._since_log):
                meter.add(loss, grad_norm, lr, self._tokens_per_step)
            if (step + 1) % self._log_every == 0:
                self._on_log(self._since_log.report(), step + 1)
                self._since_log = _Meter().resume()
        self._since_log.pause()
        return whole.report()

    def forget_momentum(self) -> None:
        """Start with a fresh optimizer state, after values that were not finite."""
        self._optimizer = self._new_optimizer()

    @property
    def _tokens_per_step(self) -> int:
        return self._config.batch_size * self._batches.seq_len

    def _new_optimizer(self) -> torch.optim.Optimizer:
        config = self._config
        return torch.optim.AdamW(
            self._replica.model.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )

    def _step(self, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one optimizer step; returns loss and gradient norm, left on the device."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        model, device = self._replica.model, self._replica.device
        total = torch.zeros((), device=device)
        position = self._position or 0
        num_parts = self._config.batch_size // self._config.micro_batch_size
        for _ in range(num_parts):
            batch = self._batches.batch(position, self._config.micro_batch_size)
            position += self._config.micro_batch_size
            tokens = batch.to(device, non_blocking=True)
            with self._autocast():
                logits = model(input_ids=tokens[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / num_parts).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / num_parts
        self._position = position
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total, grad_norm

    def _autocast(self) -> AbstractContextManager[object]:
        if not uses_bfloat16(self._config.precision, self._replica.device):
            return nullcontext()
        return torch.autocast(self._replica.device.type, dtype=torch.bfloat16)


def uses_bfloat16(precision: str, device: torch.device) -> bool:
    """Return whether the forward pass runs in bfloat16: if asked, or if the GPU has it."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bfloat16"


class _Meter:
    """Sums over inner steps, kept on the device so that a GPU is not waited for."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._resumed_at: float | None = None
        self._losses: list[torch.Tensor] = []
        self._grad_norms: list[torch.Tensor] = []
        self._num_tokens = 0
        self._lr = 0.0

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float, num_tokens: int) -> None:
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)
        self._lr = lr
        self._num_tokens += num_tokens

    def pause(self) -> None:
        if self._resumed_at is not None:
            self._seconds += time.monotonic() - self._resumed_at
            self._resumed_at = None

    def resume(self) -> "_Meter":
        if self._resumed_at is None:
            self._resumed_at = time.monotonic()
        return self

    def report(self, *, stopped: bool = False) -> InnerReport:
        """Return the sums; waits for the device."""
        loss, grad_norm = _mean(self._losses), _mean(self._grad_norms)
        self.pause()
        return InnerReport(
            num_steps=len(self._losses),
            num_tokens=self._num_tokens,
            loss=loss,
            grad_norm=grad_norm,
            lr=self._lr,
            duration=Seconds(self._seconds),
            stopped=stopped,
        )


def _mean(values: list[torch.Tensor]) -> float:
    return float(torch.stack(values).mean()) if values else math.nan
