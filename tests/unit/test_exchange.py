"""The exchange of averages, over links in memory that fail when the test says so."""

import random

import pytest
import torch

from opendiloco.averaging.frames import Frame, FrameKind
from opendiloco.averaging.group import Role
from opendiloco.averaging.protocol import RoundPhase
from tests.support.exchanges import Hub, Played, play


def vectors(count: int, size: int = 5000, *, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(count)]


def assert_equal_average(played: Played, members: set[int]) -> None:
    """All members have an average, the same one, of the same peers' data."""
    reports = played.reports()
    assert reports.keys() >= members, played.errors()
    first = min(members)
    for member in members:
        assert torch.equal(played.vectors[member], played.vectors[first])
        assert reports[member].contributors == reports[first].contributors


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_every_member_ends_with_the_float64_mean_rounded_to_float32(count: int) -> None:
    given = vectors(count)
    weights = [1.0 + i for i in range(count)]

    played = play(given, weights=weights)

    assert_equal_average(played, set(range(count)))
    mean = sum(v.double() * w for v, w in zip(given, weights, strict=True)) / sum(weights)
    assert isinstance(mean, torch.Tensor)
    torch.testing.assert_close(played.vectors[0], mean.float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_lossy_codec_leaves_all_members_with_the_same_bytes(codec: str) -> None:
    given = vectors(4, 30_000)

    played = play(given, codec=codec)

    assert_equal_average(played, {0, 1, 2, 3})
    error = played.vectors[0] - torch.stack(given).mean(0)
    assert 0 < error.square().mean().sqrt() < 0.02


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1025])
def test_vectors_with_fewer_elements_than_members_are_averaged(size: int) -> None:
    given = vectors(4, size)

    played = play(given, codec="int8")

    assert_equal_average(played, {0, 1, 2, 3})


PHASES = [RoundPhase.FIRST_PART, RoundPhase.EXCHANGE, RoundPhase.COMMIT]


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: str(phase.value))
def test_a_member_that_dies_leaves_the_others_with_one_average(
    phase: RoundPhase, victim: int
) -> None:
    fired = []

    def kill(hub: Hub, member: int, entered: RoundPhase) -> None:
        if member == victim and entered is phase:
            fired.append(member)
            hub.kill(victim)

    played = play(vectors(4), on_phase=kill)

    assert fired == [victim]
    assert_equal_average(played, {0, 1, 2, 3} - {victim})


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: str(phase.value))
def test_a_member_that_freezes_is_left_behind_after_the_stall_timeout(
    phase: RoundPhase, victim: int
) -> None:
    fired = []

    def freeze(hub: Hub, member: int, entered: RoundPhase) -> None:
        if member == victim and entered is phase:
            fired.append(member)
            hub.frozen.add(victim)

    played = play(vectors(4), on_phase=freeze, stall=0.5)

    assert fired == [victim]
    assert_equal_average(played, {0, 1, 2, 3} - {victim})


def test_two_members_that_cannot_reach_each_other_cost_only_one_of_them() -> None:
    def cut(hub: Hub, member: int, entered: RoundPhase) -> None:
        if member == 1 and entered is RoundPhase.FIRST_PART:
            hub.cut(1, 2)

    played = play(vectors(4), on_phase=cut)

    survivors = set(played.reports())
    assert len(survivors) == 3
    assert survivors >= {0, 3}
    assert_equal_average(played, survivors)


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (3, 0)])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: str(phase.value))
def test_a_connection_that_breaks_and_can_be_opened_anew_costs_nobody_its_work(
    phase: RoundPhase, pair: tuple[int, int]
) -> None:
    fired = []

    def reset(hub: Hub, member: int, entered: RoundPhase) -> None:
        if member == pair[0] and entered is phase:
            fired.append(member)
            hub.reset(*pair)

    given = vectors(4, 200_000)

    played = play(given, on_phase=reset)

    assert fired == [pair[0]]
    assert_equal_average(played, {0, 1, 2, 3})
    assert played.reports()[0].contributors == (0, 1, 2, 3)
    torch.testing.assert_close(
        played.vectors[0], torch.stack(given).double().mean(0).float(), rtol=2e-7, atol=0
    )


def test_a_connection_that_breaks_again_and_again_costs_one_of_the_two() -> None:
    def reset(sender: int, receiver: int, frame: Frame) -> Frame | None:
        if {sender, receiver} == {1, 2} and frame.kind is FrameKind.CONTRIBUTION:
            holder[0].reset(1, 2)
            return None
        return frame

    holder: list[Hub] = []

    def remember(hub: Hub, _member: int, _entered: RoundPhase) -> None:
        holder[:] = [hub]

    played = play(vectors(4, 200_000), alter=reset, on_phase=remember)

    survivors = set(played.reports())
    assert len(survivors) == 3
    assert survivors >= {0, 3}
    assert_equal_average(played, survivors)


def test_of_a_group_cut_in_two_halves_nobody_has_an_average() -> None:
    def cut(hub: Hub, _member: int, entered: RoundPhase) -> None:
        if entered is RoundPhase.FIRST_PART:
            for one in (0, 1):
                for other in (2, 3):
                    hub.cut(one, other)

    played = play(vectors(4), on_phase=cut)

    assert played.errors().keys() == {0, 1, 2, 3}
    assert "2 members can agree, 3 are needed" in played.errors()[0]


def test_clients_reduce_nothing_and_get_the_same_average() -> None:
    given = vectors(4)

    played = play(given, roles=[Role.CLIENT, Role.FULL, Role.CLIENT, Role.CLIENT])

    assert_equal_average(played, {0, 1, 2, 3})
    assert not any({0, 2, 3} >= {sender, receiver} for sender, receiver, _ in played.hub.sent)


def test_an_auxiliary_reduces_and_contributes_nothing() -> None:
    given = vectors(3)

    played = play(given, roles=[Role.FULL, Role.AUXILIARY, Role.CLIENT])

    expected = (given[0].double() + given[2].double()) / 2
    assert_equal_average(played, {0, 2})
    torch.testing.assert_close(played.vectors[0], expected.float(), rtol=2e-7, atol=0)
    assert torch.equal(played.vectors[1], given[1])
    assert played.reports()[0].contributors == (0, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_who_sends_absurd_values_is_excluded_by_name(bad: float) -> None:
    def spoil(sender: int, _receiver: int, frame: Frame) -> Frame | None:
        if sender == 2 and frame.kind is FrameKind.CONTRIBUTION:
            return frame.carrying(torch.full((len(frame.payload) // 4,), bad).numpy().tobytes())
        return frame

    played = play(vectors(4), alter=spoil)

    assert_equal_average(played, {0, 1, 3})
    assert torch.isfinite(played.vectors[0]).all()
    assert "not finite or absurdly large" in dict(played.hub.exchanges[0].dropped)["peer-2"]
    assert 2 in played.errors()


def test_who_cannot_encode_its_own_values_leaves_at_once() -> None:
    given = vectors(4)
    given[2][1234] = float("nan")

    played = play(given, stall=30.0)

    assert_equal_average(played, {0, 1, 3})
    assert "left: " in dict(played.hub.exchanges[0].dropped)["peer-2"]
    assert "finite" in played.errors()[2]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e30])
def test_who_announces_a_senseless_weight_is_left_out_by_all(weight: float) -> None:
    given = vectors(4)

    played = play(given, weights=[1.0, weight, 1.0, 1.0], quorum=2)

    expected = (given[0].double() + given[2].double() + given[3].double()) / 3
    assert_equal_average(played, {0, 2, 3})
    torch.testing.assert_close(played.vectors[0], expected.float(), rtol=2e-7, atol=0)
    assert 1 in played.errors()


def test_a_reducer_that_tells_one_member_something_else_cannot_split_the_group() -> None:
    def lie(sender: int, receiver: int, frame: Frame) -> Frame | None:
        if (sender, receiver) == (1, 3) and frame.kind is FrameKind.AVERAGE:
            return frame.carrying(bytes(len(frame.payload)))
        return frame

    played = play(vectors(4), alter=lie)

    assert_equal_average(played, {0, 1, 2})
    assert "that this peer lacks" in played.errors()[3]


def test_a_decision_that_only_one_member_hears_from_the_dying_coordinator_counts_for_all() -> None:
    def kill_after_one_commit(sender: int, receiver: int, frame: Frame) -> Frame | None:
        if sender == 0 and frame.kind is FrameKind.COMMIT:
            if receiver != 1:
                return None
            hub = holder[0]
            hub.kill(0)
        return frame

    holder: list[Hub] = []

    def remember(hub: Hub, _member: int, _entered: RoundPhase) -> None:
        holder[:] = [hub]

    played = play(vectors(4), alter=kill_after_one_commit, on_phase=remember)

    assert holder[0].dead == {0}
    assert_equal_average(played, {1, 2, 3})


@pytest.mark.parametrize("seed", range(40))
def test_no_fault_at_any_moment_leaves_two_different_averages(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    count = dice.choice([2, 3, 4, 5, 8])
    roles = [Role.FULL] + [
        dice.choice([Role.FULL, Role.FULL, Role.CLIENT]) for _ in range(count - 1)
    ]
    faults = dice.choice([1, 1, 2, 3])
    moments = sorted(dice.randrange(1, 60 * count) for _ in range(faults))
    happened = []

    def maybe(sender: int, receiver: int, frame: Frame) -> Frame | None:
        hub = holder[0] if holder else None
        if hub is not None and moments and len(hub.sent) >= moments[0]:
            moments.pop(0)
            what = dice.choice(["kill", "freeze", "cut", "reset", "reset"])
            happened.append(what)
            if what == "kill":
                hub.kill(dice.choice([sender, receiver]))
            elif what == "freeze":
                hub.frozen.add(dice.choice([sender, receiver]))
            elif what == "reset":
                hub.reset(sender, receiver)
            else:
                hub.cut(sender, receiver)
        return frame

    holder: list[Hub] = []

    def remember(hub: Hub, _member: int, _entered: RoundPhase) -> None:
        holder[:] = [hub]

    played = play(
        vectors(count, seed=seed),
        roles=roles,
        alter=maybe,
        on_phase=remember,
        stall=0.4,
        timeout=8.0,
    )

    averages = {
        tuple(played.vectors[i].tolist()) for i in played.reports() if i not in played.hub.dead
    }
    assert len(averages) <= 1, happened
    if set(happened) <= {"reset"} and len(happened) <= 3:
        assert len(played.reports()) == count, played.errors()
