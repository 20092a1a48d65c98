"""Inner steps: the same numbers as a bare loop, at the learning rate of the swarm."""

import math
import threading

import numpy as np
import pytest
import torch
from torch.nn import functional

from peers.batches import Batches
from peers.config import InnerConfig
from peers.inner import InnerReport, InnerTrainer, learning_rate, uses_bfloat16
from peers.parallel import Replica

SEQ_LEN = 8


class TinyModel(torch.nn.Module):
    """Next-token scores from the current token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(16, 16)

    def forward(self, input_ids: torch.Tensor) -> "TinyModel":
        self.logits = self.table(input_ids)
        return self


def make_batches() -> Batches:
    tokens = np.random.default_rng(1).integers(0, 16, 2000).astype(np.uint16)
    return Batches(tokens, seq_len=SEQ_LEN, seed=5, peer_key="me")


def make_trainer(
    config: InnerConfig, model: torch.nn.Module, logged: list[tuple[InnerReport, int]] | None = None
) -> InnerTrainer:
    return InnerTrainer(
        Replica(model, torch.device("cpu")),
        make_batches(),
        config,
        log_every=2,
        on_log=lambda report, step: logged.append((report, step)) if logged is not None else None,
    )


def bare_loop(model: TinyModel, config: InnerConfig, first_step: int, num_steps: int) -> float:
    """AdamW on whole batches, written out; returns the mean loss."""
    batches = make_batches()
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    losses = []
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (first_step + step + 1) / config.warmup_steps)
        batch = batches.batch((first_step + step) * config.batch_size, config.batch_size)
        logits = model(batch[:, :-1]).logits
        loss = functional.cross_entropy(logits.reshape(-1, 16), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def test_inner_steps_equal_a_bare_loop_over_whole_batches() -> None:
    config = InnerConfig(batch_size=4, micro_batch_size=1, warmup_steps=100, lr=0.01)
    ours, bare = TinyModel(), TinyModel()
    trainer = make_trainer(config, ours)

    report = trainer.run(6, first_step=40, until=threading.Event())
    expected_loss = bare_loop(bare, config, 40, 6)

    assert report.loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(ours.table.weight, bare.table.weight, rtol=1e-5, atol=1e-6)


def test_a_span_reports_its_steps_and_tokens() -> None:
    trainer = make_trainer(InnerConfig(batch_size=4, micro_batch_size=2), TinyModel())

    report = trainer.run(3, first_step=0, until=threading.Event())

    assert (report.num_steps, report.num_tokens) == (3, 3 * 4 * SEQ_LEN)
    assert not report.stopped
    assert report.duration > 0


def test_the_log_is_called_every_so_many_swarm_steps_and_covers_each_step_once() -> None:
    logged: list[tuple[InnerReport, int]] = []
    trainer = make_trainer(InnerConfig(batch_size=2, micro_batch_size=2), TinyModel(), logged)

    trainer.run(3, first_step=10, until=threading.Event())
    trainer.run(3, first_step=13, until=threading.Event())

    assert [step for _, step in logged] == [12, 14, 16]
    assert [report.num_steps for report, _ in logged] == [2, 2, 2]


def test_a_peer_told_to_leave_takes_no_further_step() -> None:
    model = TinyModel()
    before = model.table.weight.detach().clone()
    trainer = make_trainer(InnerConfig(batch_size=2, micro_batch_size=2), model)
    leaving = threading.Event()
    leaving.set()

    report = trainer.run(5, first_step=0, until=leaving)

    assert report.stopped
    assert report.num_steps == 0
    assert torch.equal(model.table.weight, before)


def test_the_data_goes_on_where_the_last_span_ended() -> None:
    config = InnerConfig(batch_size=2, micro_batch_size=2, warmup_steps=1, lr=0.01)
    in_one, in_two = TinyModel(), TinyModel()

    make_trainer(config, in_one).run(4, first_step=0, until=threading.Event())
    trainer = make_trainer(config, in_two)
    trainer.run(1, first_step=0, until=threading.Event())
    trainer.run(3, first_step=1, until=threading.Event())

    assert torch.equal(in_one.table.weight, in_two.table.weight)


@pytest.mark.parametrize("swarm_step", [0, 1, 9, 10, 11, 55, 99, 100, 101, 1000])
def test_the_rate_is_a_linear_warm_up_and_then_a_cosine(swarm_step: int) -> None:
    config = InnerConfig(lr=0.5, warmup_steps=10, total_steps=100, min_lr_ratio=0.1)

    rate = learning_rate(config, swarm_step)

    if swarm_step < 10:
        expected = 0.5 * (swarm_step + 1) / 10
    else:
        angle = math.pi * min(1.0, (swarm_step - 10) / 90)
        expected = 0.05 + 0.45 * (1 + math.cos(angle)) / 2
    assert rate == pytest.approx(expected, rel=1e-12)


def test_a_joiner_takes_the_rate_that_the_others_have() -> None:
    config = InnerConfig(batch_size=2, micro_batch_size=2, warmup_steps=50)
    old, joiner = make_trainer(config, TinyModel()), make_trainer(config, TinyModel())

    old.run(20, first_step=0, until=threading.Event())
    theirs = old.run(1, first_step=20, until=threading.Event()).lr
    mine = joiner.run(1, first_step=20, until=threading.Event()).lr

    assert mine == theirs == pytest.approx(config.lr * 21 / 50)


def test_momentum_that_is_not_finite_can_be_forgotten() -> None:
    model = TinyModel()
    trainer = make_trainer(InnerConfig(batch_size=2, micro_batch_size=2, warmup_steps=1), model)
    healthy = model.table.weight.detach().clone()
    with torch.no_grad():
        model.table.weight.fill_(math.nan)
    trainer.run(1, first_step=0, until=threading.Event())

    with torch.no_grad():
        model.table.weight.copy_(healthy)
    trainer.forget_momentum()
    trainer.run(1, first_step=0, until=threading.Event())

    assert bool(torch.isfinite(model.table.weight).all())


def test_the_cpu_computes_in_float32_unless_told_otherwise() -> None:
    cpu = torch.device("cpu")

    assert not uses_bfloat16("auto", cpu)
    assert not uses_bfloat16("float32", cpu)
    assert uses_bfloat16("bfloat16", cpu)
