"""The main loop of a peer."""

import time
from contextlib import ExitStack

from opendiloco.diloco import Verdict
from opendiloco.events import EventLog
from opendiloco.tensors import Layout
from peers.config import PeerConfig
from peers.connection import Connection
from peers.console import print_event
from peers.batches import Batches
from peers.data import build_token_cache
from peers.inner import InnerTrainer
from peers.lifecycle import LeaveRequestedError, Leaving
from peers.model import build_model, load_model_config, parameter_shapes, save_model
from peers.parallel import Replica, choose_device
from peers.swarm import Seat
from peers.tokenizer import load_tokenizer


def run_peer(config: PeerConfig) -> None:
    """Join the swarm and train until done or told to leave.

    Raises:
        OpenDiLoCoError: With the exit code and the line for the user.
    """
    leaving = Leaving()
    leaving.install()
    with ExitStack() as stack:
        try:
            _run(config, leaving, stack)
        except LeaveRequestedError:
            return


def _run(config: PeerConfig, leaving: Leaving, stack: ExitStack) -> None:
    device = choose_device(config.device)
    log = EventLog(config.out_dir / "events.jsonl", listener=print_event)
    stack.callback(log.close)
    tokenizer = load_tokenizer(config.data.tokenizer)
    text = build_token_cache(config.data.sources, tokenizer, config.data.cache_dir)
    model_config = load_model_config(
        config.model.preset,
        config.model.config,
        vocab_size=tokenizer.vocab_size,
        seq_len=config.data.seq_len,
    )
    layout = Layout.of(parameter_shapes(model_config), num_fragments=config.diloco.num_fragments)
    connection = Connection(config, layout, log=log, leaving=leaving, tokenizer=tokenizer.digest)
    stack.callback(connection.close)
    seat = Seat(config, layout, connection, log=log)
    # Only now, after hivemind has forked, may CUDA and other threads come to life.
    replica = Replica(build_model(model_config, seed=config.seed), device)
    trainer = InnerTrainer(
        replica,
        Batches(
            text.tokens,
            seq_len=config.data.seq_len,
            seed=config.seed,
            peer_key=connection.peer_id,
        ),
        config.inner,
        log_every=config.log_every,
        on_log=seat.note_inner,
    )
    replica.load(seat.join(replica.export))
    began_at = time.monotonic()
    leaving.settle()
    seconds_computing = train(seat, replica, trainer, leaving, config.diloco.outer_steps)
    wall = time.monotonic() - began_at
    folder = config.out_dir / "model"
    save_model(folder, model_config, seat.diloco.state.parameters(layout), tokenizer)
    log.emit("saved", path=str(folder))
    log.emit(
        "left",
        reason=leaving.reason,
        outer_step=seat.diloco.state.outer_step,
        digest=seat.diloco.state.digest,
        num_tokens=seat.num_tokens,
        utilization=seconds_computing / wall if wall > 0 else 0.0,
    )


def train(
    seat: Seat, replica: Replica, trainer: InnerTrainer, leaving: Leaving, outer_steps: int | None
) -> float:
    """Alternate inner steps and swarm events; returns the seconds spent in inner steps.

    Args:
        seat: This peer's part in the run.
        replica: The model.
        trainer: Takes the inner steps.
        leaving: Ends the loop after the inner step under way.
        outer_steps: Stop at this outer step; None to go on until told.
    """
    computing = 0.0
    while outer_steps is None or seat.diloco.state.outer_step < outer_steps:
        span = seat.schedule.next_span(seat.diloco.inner_step, in_flight=seat.diloco.in_flight)
        inner = trainer.run(span.num_steps, first_step=seat.swarm_step, until=leaving.event)
        computing += inner.duration
        seat.count(inner)
        if inner.stopped:
            break
        for event in span.events:
            report = seat.handle(event, replica.export())
            if report is None or report.parameters is None:
                continue
            replica.load(report.parameters)
            if report.verdict is Verdict.DISCARDED:
                trainer.forget_momentum()
    return computing
