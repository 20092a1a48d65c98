"""The outer loop of one peer: begin a round, finish it, catch up."""

import enum
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from opendiloco.averaging.protocol import Averager, RoundOutcome, RoundRequest, RoundResult
from opendiloco.errors import SwarmLostError
from opendiloco.outer import NesterovConfig, is_within_bounds, nesterov_step, pseudo_gradient_
from opendiloco.schedule import OuterSchedule
from opendiloco.state import OuterState
from opendiloco.tensors import Layout, TensorSet
from opendiloco.units import OuterStep, Seconds

_MIXING = 0.5  # alpha of arXiv:2501.18512, Algorithm 2: share of the new anchor
_GRACE = Seconds(60.0)  # beyond its timeout a round may still be cleaning up


class Verdict(enum.Enum):
    """What became of this peer's inner steps."""

    COMMITTED = "committed"  # they are in the new anchor
    CARRIED = "carried"  # the round failed; they stay in the model and count in the next one
    REBASED = "rebased"  # the swarm had moved on; they were put on top of its anchor
    DISCARDED = "discarded"  # they are gone: the swarm moved on, or they were absurd


class Weighting(enum.Enum):
    """What a peer's weight in the average is."""

    TOKENS = "tokens"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class OuterReport:
    """One outer step as this peer lived it.

    Attributes:
        outer_step: Outer step after it.
        verdict: What became of the inner steps.
        parameters: What the model must take over, named float32 CPU tensors; None when it
            keeps what it has.
        round: The round behind it; None when there was none.
        is_absurd: The local parameters were not finite or far off, so that the inner
            optimizer's state is not to be trusted either.
    """

    outer_step: OuterStep
    verdict: Verdict
    parameters: TensorSet | None
    round: RoundResult | None
    is_absurd: bool = False


@dataclass(frozen=True, slots=True)
class _Export:
    """What a round in flight was begun with."""

    future: Future[RoundResult]
    fragment: int
    inner_step: int
    num_tokens: int


class DiLoCo:
    """Holds the outer state and moves it forward, round by round.

    Knows no model, no GPU and no socket: those belong to the caller and the averager.
    Not safe to use from several threads.
    """

    def __init__(
        self,
        state: OuterState,
        layout: Layout,
        *,
        averager: Averager,
        schedule: OuterSchedule,
        outer: NesterovConfig,
        weighting: Weighting = Weighting.TOKENS,
        round_timeout: Seconds = Seconds(300.0),
    ) -> None:
        state.hold()
        self._state = state
        self._layout = layout
        self._averager = averager
        self._schedule = schedule
        self._outer = outer
        self._weighting = weighting
        self._round_timeout = round_timeout
        self._inner_step = 0
        self._num_tokens = 0
        self._export: _Export | None = None
        self._unsettled: _Export | None = None  # of the first failed round at this outer step

    @property
    def state(self) -> OuterState:
        """The outer state after the last committed outer step.

        Hold it to use it beyond the next commit.
        """
        return self._state

    @property
    def inner_step(self) -> int:
        """Inner steps since the export for the last committed round."""
        return self._inner_step

    @property
    def num_tokens(self) -> int:
        """Tokens of this peer that are in no committed round yet."""
        return self._num_tokens

    @property
    def in_flight(self) -> bool:
        """Whether a round has begun and is not finished."""
        return self._export is not None

    def count(self, *, num_steps: int, num_tokens: int) -> None:
        """Take note of inner steps that the caller took, and the tokens in them."""
        self._inner_step += num_steps
        self._num_tokens += num_tokens

    def begin_round(self, local: TensorSet) -> Verdict | None:
        """Begin to average this peer's progress on the next fragment.

        Args:
            local: The peer's parameters, named; they must not change before
                :meth:`finish_round` unless the schedule overlaps.

        Returns:
            None when the round has begun. ``DISCARDED`` when the local parameters are not
            finite or absurdly far away and must not reach others: the caller goes back to
            the anchor.

        Raises:
            SchemaMismatchError: If ``local`` is not of this run's model.

        Source:
            arXiv:2311.08105, Algorithm 1, from "averaging outer gradients" on.
        """
        fragment = self._schedule.fragment(self._state.outer_step)
        anchor = self._layout.views(fragment, self._state.fragments[fragment].anchor)
        mine = self._layout.pick(fragment, local)
        if not all(is_within_bounds(anchor[name], mine[name]) for name in mine):
            self._forget_local_work()
            return Verdict.DISCARDED
        if self._schedule.overlap_steps:
            # Training goes on and changes the parameters while attempts still need them.
            mine = {name: tensor.detach().clone() for name, tensor in mine.items()}

        def fill(out: torch.Tensor) -> None:
            for name, view in self._layout.views(fragment, out).items():
                pseudo_gradient_(view, anchor[name], mine[name])

        tokens = self._num_tokens
        request = RoundRequest(
            outer_step=self._state.outer_step,
            fragment=fragment,
            fill=fill,
            weight=float(tokens) if self._weighting is Weighting.TOKENS else 1.0,
            num_tokens=tokens,
            timeout=self._round_timeout,
            lineage=self._state.lineage,
        )
        self._export = _Export(self._averager.begin(request), fragment, self._inner_step, tokens)
        return None

    def finish_round(self, local: TensorSet) -> OuterReport:
        """Wait for the round that has begun, and apply its result.

        Args:
            local: The peer's parameters now, named.

        Returns:
            What became of the inner steps. Lost peers, timeouts and an empty swarm are
            outcomes in the report, not exceptions.

        Raises:
            SwarmLostError: If the averager does not answer any more.
        """
        export = self._export
        if export is None:
            raise RuntimeError("no round has begun")
        try:
            result = export.future.result(timeout=self._round_timeout + _GRACE)
        except TimeoutError:
            raise SwarmLostError("the round does not end; start this peer again") from None
        self._export = None
        if result.outcome is RoundOutcome.FAILED or result.average is None:
            self._note_unsettled(export)
            return OuterReport(self._state.outer_step, Verdict.CARRIED, None, result)
        self._commit(export, result)
        return OuterReport(
            self._state.outer_step, Verdict.COMMITTED, self._merge(export.fragment, local), result
        )

    def adopt(
        self, state: OuterState, local: TensorSet, *, keep_local_work: bool, peer_id: str = ""
    ) -> OuterReport:
        """Take over the state of a swarm that has moved on.

        The others may have averaged this peer's work with theirs without its learning so in
        time. Then it is committed like theirs, and does not count again.

        Args:
            state: The newer state.
            local: The peer's parameters, named; read before they are replaced.
            keep_local_work: Put ``local - old anchor`` on top of the new anchor, so that
                the work counts in the next round; otherwise, or if it is absurd, it is discarded.
            peer_id: How this peer is called among a state's contributors; empty if unknown.
        """
        if self._export is not None:
            raise RuntimeError("a round is in flight; finish it first")
        settled = self._settled_by(state) if peer_id in state.contributors else frozenset()
        old = self._state.parameters(self._layout)
        parameters = state.parameters(self._layout)
        is_absurd = not all(is_within_bounds(old[name], local[name]) for name in old)
        keep_local_work = keep_local_work and not is_absurd
        if keep_local_work:
            parameters = {
                name: anchor
                if name in settled
                else (local[name].to("cpu", torch.float32) - old[name]).add_(anchor)
                for name, anchor in parameters.items()
            }
        self._replace(state)
        if settled or not keep_local_work:
            self._forget_local_work()
        verdict = Verdict.REBASED if keep_local_work else Verdict.DISCARDED
        if settled:
            verdict = Verdict.COMMITTED
        return OuterReport(state.outer_step, verdict, parameters, None, is_absurd=is_absurd)

    def replace_averager(self, averager: Averager) -> None:
        """Go on with another averager; a round in flight is given up, and its work kept."""
        self._averager = averager
        if self._export is not None:
            self._note_unsettled(self._export)
            self._export = None

    def align(self, inner_step: int) -> None:
        """Take the position of peers that are further in the span, to be ready with them.

        The tokens that count are still only those that this peer trained on. Where the
        others wait at the end of their span already, one inner step is left to take.
        """
        steps = self._schedule.steps_per_round
        at_the_end = inner_step > 0 and inner_step % steps == 0
        self._inner_step = steps - 1 if at_the_end else inner_step % steps

    def _commit(self, export: _Export, result: RoundResult) -> None:
        assert result.average is not None  # noqa: S101 - a committed round has an average
        fragments = list(self._state.fragments)
        before = fragments[export.fragment]
        fragments[export.fragment] = nesterov_step(
            before,
            result.average,
            config=self._outer,
            in_place=before.holders.take_over(),  # half the memory, if nobody downloads it
        )
        self._replace(
            OuterState(
                outer_step=OuterStep(self._state.outer_step + 1),
                num_tokens=self._state.num_tokens + result.num_tokens,
                fragments=tuple(fragments),
                contributors=tuple(sorted(result.contributors)),
            )
        )
        self._inner_step -= export.inner_step
        self._num_tokens -= export.num_tokens

    def _note_unsettled(self, export: _Export) -> None:
        """Remember a round without an average here: the others may have one, with this in it."""
        self._unsettled = self._unsettled or export

    def _settled_by(self, state: OuterState) -> frozenset[str]:
        """Return the parameters whose progress is in a state that this peer contributed to.

        No parameters, if there were inner steps after the export: what it held is not known
        any more.
        """
        export = self._unsettled
        is_next = state.outer_step == self._state.outer_step + 1
        if export is None or not is_next or export.inner_step != self._inner_step:
            return frozenset()
        return frozenset(spec.name for spec in self._layout.fragments[export.fragment])

    def _replace(self, state: OuterState) -> None:
        self._unsettled = None
        state.hold()
        self._state.release()
        self._state = state

    def _merge(self, fragment: int, local: TensorSet) -> TensorSet:
        """Return the model's parameters after a commit of this fragment."""
        anchor = self._layout.views(fragment, self._state.fragments[fragment].anchor)
        if self._schedule.overlap_steps == 0:
            return anchor
        mine = self._layout.pick(fragment, local)
        return {name: torch.lerp(mine[name].float(), anchor[name], _MIXING) for name in anchor}

    def _forget_local_work(self) -> None:
        self._unsettled = None
        self._inner_step = 0
        self._num_tokens = 0
