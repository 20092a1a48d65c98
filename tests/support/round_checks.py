"""What must hold after a round, whatever happened in it; expected values in numpy."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from tests.support.reference import MOMENTUM, weighted_mean
from tests.support.round_peer import SAMPLE_STRIDE, base_vector
from tests.support.round_swarm import Round

_ROUNDING = 1e-4
"""Of fp16, three times and with margin, in sums of pseudo-gradients that are 0.1 at most."""


@lru_cache(maxsize=8)
def _sample(member: int, size: int) -> npt.NDArray[np.float64]:
    """Return a member's vector at the positions that peers report."""
    return base_vector(member, size).numpy()[::SAMPLE_STRIDE].astype(np.float64)


def how_it_ended(held: Round) -> str:
    """Return for every member what came of the round, as a message can show it."""
    names = ("verdict", "outer_step", "num_peers", "total_weight", "attempts", "reason", "dropped")
    return "\n".join(
        f"{member}: {event['digest'][:8]} " + ", ".join(f"{name} {event[name]}" for name in names)
        for member, event in held.ended.items()
    )


def assert_one_state(held: Round, members: Iterable[int]) -> None:
    """All these members ended the round with the same state."""
    ended = {member: held.ended[member] for member in members}
    states = {(event["outer_step"], event["digest"]) for event in ended.values()}
    assert len(states) == 1, how_it_ended(held)


def assert_committed(held: Round, members: Iterable[int]) -> None:
    """All these members have a new state, made of an average."""
    for member in members:
        ended = held.ended[member]
        assert ended["verdict"] in {"committed", "rebased"}, how_it_ended(held)
        assert ended["outer_step"] == held.before["outer_step"] + 1


def assert_carried(held: Round, members: Iterable[int]) -> None:
    """Nothing has changed for any of these members."""
    for member in members:
        assert held.ended[member]["digest"] == held.before["digest"], member


def assert_average_is_of(
    held: Round, *, size: int, survivors: Sequence[int], victim: int | None = None
) -> None:
    """The average is that of the survivors, here and there with the data of those that were lost.

    A survivor whose work is not in it says so. The weight of a victim, or of a member that was
    lost on the way and took the state over later, is in the total only if its data is in the
    average.
    """
    committed = [m for m in survivors if held.ended[m]["verdict"] == "committed"]
    # Who took the state over from others has heard of no weights.
    late = [m for m in committed if held.ended[m]["total_weight"] is None]
    sure = [m for m in committed if m not in late]
    totals = {held.ended[member]["total_weight"] for member in sure}
    assert len(totals) == 1, how_it_ended(held)
    after = np.asarray(held.ended[sure[0]]["momentum"], dtype=np.float64)
    before = np.asarray(held.before["momentum"], dtype=np.float64)
    average = after - MOMENTUM * before
    without = np.abs(average - _mean(held, sure, size))
    if totals == {_total(held, sure)}:
        assert not late, f"took work for committed that is not\n{how_it_ended(held)}"
        assert without.max() < _ROUNDING, how_it_ended(held)
        return
    lost = late if victim is None else sorted({*late, victim})
    assert lost, f"{totals} in all\n{how_it_ended(held)}"
    assert totals == {_total(held, [*sure, *lost])}, how_it_ended(held)
    here_and_there = [
        np.abs(average - _mean(held, [*sure, *some], size))
        for count in range(len(lost) + 1)
        for some in combinations(lost, count)
    ]
    assert np.min(here_and_there, axis=0).max() < _ROUNDING, how_it_ended(held)
    assert without.max() > _ROUNDING, "a weight counts whose data is nowhere"


def _mean(held: Round, members: Sequence[int], size: int) -> npt.NDArray[np.floating]:
    # The pseudo-gradient is the anchor minus what training has made of it.
    vectors = [-held.trained[member]["scale"] * _sample(member, size) for member in members]
    return weighted_mean(vectors, [held.trained[member]["weight"] for member in members])


def _total(held: Round, members: Sequence[int]) -> float:
    return float(sum(held.trained[member]["weight"] for member in members))
