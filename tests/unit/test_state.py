"""The outer state: its slices cover it, and its digest is that of its exact bytes."""

import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opendiloco import state as state_module
from opendiloco.state import (
    FragmentState,
    OuterState,
    empty_state,
    slice_bytes,
    state_digest,
)
from opendiloco.tensors import Layout
from opendiloco.units import OuterStep

SHAPES = {"embed.w": (3, 5), "layers.0.w": (7,), "layers.1.w": (2, 2), "head.w": ()}


def random_state(sizes: tuple[int, ...], *, seed: int = 0, outer_step: int = 3) -> OuterState:
    generator = torch.Generator().manual_seed(seed)
    fragments = tuple(
        FragmentState(torch.randn(n, generator=generator), torch.randn(n, generator=generator))
        for n in sizes
    )
    return OuterState(OuterStep(outer_step), 1000, fragments)


def content(state: OuterState) -> bytes:
    vectors = [v for fragment in state.fragments for v in (fragment.anchor, fragment.momentum)]
    return b"".join(vector.numpy().tobytes() for vector in vectors)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), slice_size=st.integers(1, 20))
def test_the_slices_cover_the_state_in_order(sizes: list[int], slice_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "SLICE_ELEMENTS", slice_size)
        state = random_state(tuple(sizes))
        slices = state.slices

    assert b"".join(piece.numpy().tobytes() for piece in slices) == content(state)
    assert all(1 <= piece.numel() <= slice_size for piece in slices)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), slice_size=st.integers(1, 20))
def test_an_empty_state_filled_by_slices_is_the_same_state(
    sizes: list[int], slice_size: int
) -> None:
    layout = Layout.of({f"m.{i}.w": (n,) for i, n in enumerate(sizes)}, num_fragments=len(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "SLICE_ELEMENTS", slice_size)
        state = random_state(layout.fragment_sizes)
        copy = empty_state(layout, state.outer_step, state.num_tokens, ())
        for target, piece in zip(copy.slices, state.slices, strict=True):
            slice_bytes(target)[:] = bytes(slice_bytes(piece))

    assert content(copy) == content(state)
    assert copy.digest == state.digest


def test_a_vector_longer_than_a_slice_is_cut() -> None:
    state = random_state((state_module.SLICE_ELEMENTS + 1,))

    assert [piece.numel() for piece in state.slices] == [state_module.SLICE_ELEMENTS, 1] * 2


def test_a_slices_digest_is_the_sha256_of_its_bytes() -> None:
    state = random_state((9,))

    fragment = state.fragments[0]
    assert state.slice_digests == (
        hashlib.sha256(fragment.anchor.numpy().tobytes()).digest(),
        hashlib.sha256(fragment.momentum.numpy().tobytes()).digest(),
    )


@pytest.mark.parametrize("num_processors", [1, 2, 64, None])
def test_slices_hashed_side_by_side_have_their_digests_in_order(
    num_processors: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module.os, "cpu_count", lambda: num_processors)
    monkeypatch.setattr(state_module, "_WORTH_THREADS", 0)
    monkeypatch.setattr(state_module, "SLICE_ELEMENTS", 4)
    state = random_state((50, 7))

    expected = [hashlib.sha256(piece.numpy().tobytes()).digest() for piece in state.slices]
    assert len(expected) == 30
    assert list(state.slice_digests) == expected


def test_a_state_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state((9, 4))
    first = state.digest
    monkeypatch.setattr(state_module.hashlib, "sha256", None)  # to hash again would fail

    assert state.digest == first
    assert state.lineage == first[:16]


def test_equal_states_have_equal_digests() -> None:
    assert random_state((9, 4)).digest == random_state((9, 4)).digest


def test_the_digest_follows_from_the_slices_digests_alone() -> None:
    state = random_state((9, 4))

    assert state_digest(3, 1000, (), state.slice_digests) == state.digest


def test_who_is_in_the_last_outer_step_belongs_to_the_digest() -> None:
    state = random_state((9, 4))

    others = [replace(state, contributors=who).digest for who in (("a",), ("b",), ("a", "b"))]

    assert len({state.digest, *others}) == 4


@pytest.mark.parametrize("which", ["anchor", "momentum"])
def test_one_flipped_bit_changes_the_digest(which: str) -> None:
    state, other = random_state((9, 4)), random_state((9, 4))

    vector: torch.Tensor = getattr(other.fragments[1], which)
    vector.view(torch.int32)[2] ^= 1

    assert other.digest != state.digest


def test_minus_zero_is_not_zero() -> None:
    digests = {
        OuterState(OuterStep(0), 0, (FragmentState(torch.tensor([zero]), torch.ones(1)),)).digest
        for zero in (0.0, -0.0)
    }

    assert len(digests) == 2


@pytest.mark.parametrize("changes", [{"outer_step": 4}, {"num_tokens": 1001}])
def test_outer_step_and_tokens_are_part_of_the_digest(changes: dict[str, int]) -> None:
    state = random_state((9,))

    assert replace(state, **changes).digest != state.digest  # type: ignore[arg-type]


def test_swapping_two_fragments_changes_the_digest() -> None:
    state = random_state((9, 9))

    assert replace(state, fragments=state.fragments[::-1]).digest != state.digest


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_the_first_state_is_the_model_with_no_momentum(num_fragments: int) -> None:
    layout = Layout.of(SHAPES, num_fragments=num_fragments)
    model = {name: torch.randn(shape) for name, shape in SHAPES.items()}

    state = OuterState.initial(layout, model)

    parameters = state.parameters(layout)
    assert (state.outer_step, state.num_tokens) == (0, 0)
    assert parameters.keys() == model.keys()
    assert all(torch.equal(parameters[name], model[name]) for name in model)
    assert all(not fragment.momentum.any() for fragment in state.fragments)


def test_training_the_model_leaves_the_first_state_alone() -> None:
    layout = Layout.of(SHAPES)
    model = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    state = OuterState.initial(layout, model)

    for tensor in model.values():
        tensor.zero_()

    assert bool((state.fragments[0].anchor == 1).all())
