"""The main loop of a peer."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from opendiloco.diloco import OuterReport
from opendiloco.errors import OpenDiLoCoError, SwarmLostError
from opendiloco.events import EventLog
from opendiloco.identity import hold_identity, load_or_create_identity
from opendiloco.leaving import LeaveRequestedError, Leaving
from opendiloco.tensors import Layout, TensorSet
from opendiloco.units import Seconds
from peers.batches import Batches
from peers.config import PeerConfig
from peers.connection import Connection
from peers.console import print_event
from peers.data import build_token_cache
from peers.inner import InnerTrainer
from peers.model import build_model, config_digest, load_model_config, parameter_shapes, save_model
from peers.parallel import Replica, choose_device
from peers.repair import Repairer
from peers.swarm import Seat
from peers.terms import shared_terms
from peers.tokenizer import load_tokenizer

_TELL_EVERY = Seconds(5.0)


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
    text = build_token_cache(
        config.data.sources,
        tokenizer,
        config.data.cache_dir,
        on_progress=_tell_now_and_then(log, "tokenising the text"),
    )
    model_config = load_model_config(
        config.model.preset,
        config.model.config,
        vocab_size=tokenizer.vocab_size,
        seq_len=config.data.seq_len,
    )
    layout = Layout.of(parameter_shapes(model_config), num_fragments=config.diloco.num_fragments)
    identity = load_or_create_identity(config.identity_path, option="--network.identity")
    stack.enter_context(hold_identity(identity, option="--network.identity"))
    batches = Batches(
        text.tokens, seq_len=config.data.seq_len, seed=config.seed, peer_key=identity.peer_id
    )
    terms = shared_terms(
        config, layout, model=config_digest(model_config), tokenizer=tokenizer.digest
    )
    connection = Connection(config, layout, identity, terms=terms, log=log, leaving=leaving)
    stack.callback(connection.close)
    seat = Seat(config, layout, connection, log=log)
    # Only now, after hivemind has forked, may CUDA and other threads come to life.
    replica = Replica(build_model(model_config, seed=config.seed), device)
    trainer = InnerTrainer(
        replica, batches, config.inner, log_every=config.log_every, on_log=seat.note_inner
    )
    replica.load(seat.join(replica.export))
    began_at = time.monotonic()
    leaving.settle()
    reason = "unexpected error"
    try:
        train(
            seat,
            replica,
            trainer,
            leaving=leaving,
            repairer=Repairer(connection, seat, log=log, leaving=leaving),
            outer_steps=config.diloco.outer_steps,
        )
        reason = leaving.reason
    except OpenDiLoCoError as error:
        reason = str(error)
        raise
    finally:
        connection.say_goodbye()
        folder = config.out_dir / "model"
        if seat.diloco.state.outer_step > 0:  # never replace a trained model by the seed's
            parameters = seat.diloco.state.parameters(layout)
            save_model(folder, model_config, parameters, tokenizer)
            log.emit("saved", path=str(folder), outer_step=seat.diloco.state.outer_step)
        wall = max(1e-9, time.monotonic() - began_at)
        seat.log_leaving(reason, utilization=trainer.seconds / wall)


def train(
    seat: Seat,
    replica: Replica,
    trainer: InnerTrainer,
    *,
    leaving: Leaving,
    repairer: Repairer,
    outer_steps: int | None,
) -> None:
    """Alternate inner steps and swarm events.

    Args:
        seat: This peer's part in the run.
        replica: The model.
        trainer: Takes the inner steps.
        leaving: Ends the loop after the inner step under way.
        repairer: Brings the swarm side back when it is lost, also in the middle of a span.
        outer_steps: Stop at this outer step; None to go on until told.
    """
    while outer_steps is None or seat.diloco.state.outer_step < outer_steps:
        span = seat.schedule.next_span(seat.diloco.inner_step, in_flight=seat.diloco.in_flight)
        inner = trainer.run(span.num_steps, first_step=seat.swarm_step, until=repairer.alarm)
        seat.count(inner)
        if inner.stopped and leaving.event.is_set():
            break
        local = replica.export()
        try:
            for event in span.events:
                local = _take_over(seat.handle(event, local), local, replica, trainer)
        except SwarmLostError as error:  # at once, when the span was stopped by it
            report = repairer.repair(str(error), local)
            if leaving.event.is_set():
                break
            _take_over(report, local, replica, trainer)


def _take_over(
    report: OuterReport | None, local: TensorSet, replica: Replica, trainer: InnerTrainer
) -> TensorSet:
    """Have the model take over what came of a swarm event; returns its parameters then."""
    if report is None or report.parameters is None:
        return local
    replica.load(report.parameters)
    if report.is_absurd:
        trainer.forget_momentum()
    return {**local, **report.parameters}


def _tell_now_and_then(log: EventLog, what: str) -> Callable[[int, int], None]:
    """Return a progress callback that logs the share done and the time left, every few seconds."""
    began_at = told_at = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told_at
        moment = time.monotonic()
        if moment - told_at < _TELL_EVERY or not done:
            return
        told_at = moment
        left = (moment - began_at) * (total - done) / done
        log.emit("waiting", text=f"{what}: {done / total:.0%}, {left:.0f} s left")

    return tell
