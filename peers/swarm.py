"""The peer's seat in the swarm: it joins, takes part in rounds, and catches up."""

import time
from collections.abc import Callable

from opendiloco.averaging.protocol import RoundResult
from opendiloco.diloco import DiLoCo, OuterReport, Verdict, Weighting
from opendiloco.errors import FingerprintError, JoinError, StateUnavailableError
from opendiloco.events import EventLog
from opendiloco.outer import NesterovConfig
from opendiloco.progress.view import foreign_terms
from opendiloco.schedule import OuterSchedule, SwarmEvent
from opendiloco.state import OuterState
from opendiloco.tensors import Layout, TensorSet
from opendiloco.transfer import Download
from opendiloco.units import OuterStep, Seconds
from peers.config import PeerConfig
from peers.connection import Connection
from peers.healing import Healer
from peers.inner import InnerReport

_LOOK = Seconds(1.0)


class Seat:
    """This peer's part in the run. Rank 0 holds it.

    Made by :meth:`join`. Not safe to use from several threads.
    """

    def __init__(
        self,
        config: PeerConfig,
        layout: Layout,
        connection: Connection,
        *,
        log: EventLog,
    ) -> None:
        self._config = config
        self._layout = layout
        self._connection = connection
        self._log = log
        self._loss: float | None = None
        self._num_tokens = 0
        self._diloco: DiLoCo | None = None
        self._healer = Healer(
            connection,
            log=log,
            heartbeat=Seconds(config.network.heartbeat_s),
            timeout=Seconds(config.network.join_timeout_s),
        )
        self.schedule = OuterSchedule(
            inner_steps=config.diloco.inner_steps,
            num_fragments=config.diloco.num_fragments,
            overlap_steps=config.diloco.overlap_steps,
        )

    @property
    def diloco(self) -> DiLoCo:
        """The outer loop; there is one once the peer has joined."""
        if self._diloco is None:
            raise RuntimeError("this peer has not joined yet")
        return self._diloco

    @property
    def swarm_step(self) -> int:
        """The swarm's inner step, which sets the learning rate."""
        return self.schedule.swarm_step(self.diloco.state.outer_step, self.diloco.inner_step)

    def join(self, initial: Callable[[], TensorSet]) -> TensorSet:
        """Take part in the run from where it stands.

        Args:
            initial: Makes the parameters of the seed, equal on all peers.

        Returns:
            The parameters to train on from, named float32 CPU tensors.

        Raises:
            FingerprintError: If the swarm was started with other settings.
            JoinError: If too few peers come, or no peer gives the state, in time.
        """
        began_at = time.monotonic()
        deadline = began_at + self._config.network.join_timeout_s
        self._meet_others(deadline)
        download = self._download_newest(deadline)
        state = download.state if download else OuterState.initial(self._layout, initial())
        diloco = self._config.diloco
        self._diloco = DiLoCo(
            state,
            self._layout,
            averager=self._connection.averager,
            schedule=self.schedule,
            outer=NesterovConfig(diloco.outer_lr, diloco.outer_momentum),
            weighting=Weighting(diloco.weighting),
            round_timeout=Seconds(self._config.round_timeout_s),
        )
        self._align()
        self._tell("training")
        self._log.emit(
            "joined",
            outer_step=state.outer_step,
            seconds=time.monotonic() - began_at,
            bytes=download.num_bytes if download else 0,
            **{"from": "swarm" if download else "seed"},
        )
        return state.parameters(self._layout)

    def count(self, inner: InnerReport) -> None:
        """Take note of inner steps taken: they make this peer's weight in the average."""
        self.diloco.count(num_steps=inner.num_steps, num_tokens=inner.num_tokens)
        self._num_tokens += inner.num_tokens
        if inner.num_steps:
            self._loss = inner.loss

    def note_inner(self, inner: InnerReport, swarm_step: int) -> None:
        """Log what the last inner steps did, and let the others know how far they are."""
        inner_step = max(0, swarm_step - self.schedule.swarm_step(self._outer_step, 0))
        steps_left = -inner_step % self.schedule.steps_per_round
        self._connection.tracker.note(
            inner_step=inner_step,
            tokens_per_second=inner.tokens_per_second,
            ready_in_s=max(0.0, steps_left * inner.duration / max(1, inner.num_steps)),
        )
        self._log.emit(
            "inner",
            inner_step=swarm_step,
            loss=inner.loss,
            lr=inner.lr,
            grad_norm=inner.grad_norm,
            num_tokens=inner.num_tokens,
            tokens_per_second=inner.tokens_per_second,
        )

    def handle(self, event: SwarmEvent, local: TensorSet) -> OuterReport | None:
        """Do what is due at the end of a span.

        Args:
            event: What is due.
            local: The peer's parameters, named float32 CPU tensors.

        Returns:
            What came of it; None when there is nothing for the model to take over yet.

        Raises:
            SwarmLostError: If the averager or the DHT does not answer any more.
        """
        self._connection.check()
        if event is SwarmEvent.BEGIN_ROUND:
            return self._begin_round(local)
        return self._finish_round(local) if self.diloco.in_flight else None

    def go_on(self, local: TensorSet) -> OuterReport | None:
        """Go on after the connection was opened anew; a round in flight is given up.

        Args:
            local: The peer's parameters, named float32 CPU tensors.

        Returns:
            What is to be taken over, if the others have moved on meanwhile.
        """
        self.diloco.replace_averager(self._connection.averager)
        self._tell("training")
        return self._get_in_step(local)

    def log_leaving(self, reason: str, *, utilization: float) -> None:
        """Log that this peer leaves, with what it has and did.

        Args:
            reason: Why.
            utilization: Share of the time since it joined that went into inner steps.
        """
        self._log.emit(
            "left",
            reason=reason,
            outer_step=self._outer_step,
            digest=self.diloco.state.digest,
            num_tokens=self._num_tokens,
            utilization=utilization,
        )

    @property
    def _outer_step(self) -> OuterStep:
        return self.diloco.state.outer_step

    def _meet_others(self, deadline: float) -> None:
        """Look who is there, until there are enough; refuse a swarm that trains otherwise."""
        tracker, needed = self._connection.tracker, self._config.network.min_peers
        tracker.refresh(_LOOK)
        time.sleep(_LOOK)  # a record published just now takes a moment to be found
        tracker.refresh(_LOOK)
        self._refuse_foreign_terms()
        said = 0
        while (there := 1 + len(tracker.view().peers)) < needed:
            if time.monotonic() > deadline:
                raise JoinError(
                    f"only {there} of {needed} peers came in time; start more, or set "
                    "--network.min-peers or --network.join-timeout-s"
                )
            self._connection.check()
            if there != said:
                self._log.emit("waiting", text=f"waiting for {needed - there} more peers")
                said = there
            time.sleep(_LOOK / 4)
            tracker.refresh(_LOOK)

    def _refuse_foreign_terms(self) -> None:
        terms = self._connection.terms
        foreign = foreign_terms(
            self._connection.tracker.sightings(),
            own_peer_id=self._connection.peer_id,
            terms=terms,
            max_age=Seconds(self._config.network.peer_timeout_s),
        )
        if foreign:
            what = ", ".join(
                f"{name} is {theirs} there and {ours} here"
                for name, (ours, theirs) in foreign.items()
            )
            raise FingerprintError(
                f"run {self._config.run_id} has other settings: {what}; "
                "use the same, or another --run-id"
            )

    def _download_newest(self, deadline: float) -> Download | None:
        """Return the swarm's state; None when everybody else is at the seed's, too."""
        tracker = self._connection.tracker
        while True:
            self._connection.check()
            view = tracker.view()
            donors = view.ahead_of(OuterStep(0))
            if not donors and (view.members() or not tracker.has_distrusted):
                return None
            try:
                return self._connection.exchange.fetch(
                    donors, at_least=OuterStep(1), timeout=Seconds(deadline - time.monotonic())
                )
            except StateUnavailableError as error:
                if time.monotonic() > deadline:
                    raise JoinError(f"{error}; try again later") from None
                self._log.emit("waiting", text=f"{error}; trying again")
                for donor in donors:
                    tracker.distrust(donor.peer_id)
                time.sleep(_LOOK)
                tracker.refresh(_LOOK)

    def _begin_round(self, local: TensorSet) -> OuterReport | None:
        in_step = self._get_in_step(local)
        if in_step:
            return in_step
        if self.diloco.begin_round(local) is Verdict.DISCARDED:
            anchor = self.diloco.state.parameters(self._layout)
            report = OuterReport(self._outer_step, Verdict.DISCARDED, anchor, None, is_absurd=True)
            self._conclude(report)
            return report
        self._tell("averaging")
        return None

    def _finish_round(self, local: TensorSet) -> OuterReport:
        report = self.diloco.finish_round(local)
        if report.round is not None:
            self._log_round(report.round, report)
        if report.verdict is Verdict.CARRIED:
            in_step = self._get_in_step(local)
            if in_step:
                return in_step
        self._conclude(report)
        return report

    def _get_in_step(self, local: TensorSet) -> OuterReport | None:
        """Take over the state of the others where they are ahead or agree on another one."""
        download = self._healer.fetch_better(self.diloco.state)
        if download is None:
            return None
        keep = self._config.diloco.on_missed_round == "rebase"
        report = self.diloco.adopt(
            download.state, local, keep_local_work=keep, peer_id=self._connection.peer_id
        )
        self._align()
        self._conclude(report)
        return report

    def _align(self) -> None:
        """Start where the others are in the span, to be ready when they are."""
        view = self._connection.tracker.view()
        self.diloco.align(view.inner_step_at(self._outer_step))

    def _conclude(self, report: OuterReport) -> None:
        """Publish and log what this peer's state is now."""
        self._tell("training")
        self._log.emit(
            "outer_step",
            outer_step=report.outer_step,
            fragment=self.schedule.fragment(OuterStep(max(0, report.outer_step - 1))),
            verdict=report.verdict.value,
            digest=self.diloco.state.digest,
            num_tokens=self.diloco.state.num_tokens,
            loss=self._loss,
        )

    def _tell(self, state: str) -> None:
        """Serve the current state and publish where this peer is."""
        lineage = self.diloco.state.lineage  # hashed here, before other threads ask for it
        self._connection.exchange.publish(self.diloco.state)
        loss = self._loss if self._loss is not None and abs(self._loss) < float("inf") else None
        self._connection.tracker.update(
            state=state,
            outer_step=self._outer_step,
            inner_step=self.diloco.inner_step,
            num_tokens=self._num_tokens,
            digest=lineage,
            loss=loss,
        )

    def _log_round(self, result: RoundResult, report: OuterReport) -> None:
        step = report.outer_step - (report.verdict is Verdict.COMMITTED)
        self._log.emit(
            "round",
            outer_step=step,
            fragment=self.schedule.fragment(OuterStep(step)),
            outcome=result.outcome.value,
            num_peers=result.num_peers,
            total_weight=result.total_weight,
            matchmaking_s=result.matchmaking,
            exchange_s=result.exchange,
            commit_s=result.commit,
            wait_s=result.wait,
            bytes_sent=result.bytes_sent,
            bytes_received=result.bytes_received,
            attempts=result.attempts,
            dropped="; ".join(f"{peer[-6:]} {why}" for peer, why in result.dropped.items()),
            reason=result.reason,
        )
