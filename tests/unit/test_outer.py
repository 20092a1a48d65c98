"""The outer step: the published arithmetic, the same bytes every time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.outer import NesterovConfig, is_finite, nesterov_step, pseudo_gradient_
from opendiloco.state import FragmentState
from tests.support import reference

NUM_STEPS = 20
SIZE = 257


def gradients(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) for _ in range(NUM_STEPS)]


def start(seed: int = 1) -> FragmentState:
    anchor = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    return FragmentState(anchor, torch.zeros(SIZE))


def run(state: FragmentState, steps: list[torch.Tensor]) -> FragmentState:
    for gradient in steps:
        state = nesterov_step(state, gradient, config=NesterovConfig())
    return state


def test_twenty_steps_equal_the_reference_in_float64_to_float32_rounding() -> None:
    anchor, momentum = start().anchor.numpy(), np.zeros(SIZE)

    ours = run(start(), gradients())
    for gradient in gradients():
        anchor, momentum = reference.nesterov(anchor, momentum, gradient.numpy())

    np.testing.assert_allclose(ours.anchor.numpy(), anchor, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(ours.momentum.numpy(), momentum, rtol=1e-5, atol=5e-6)


def test_twenty_steps_equal_single_float32_operations_to_the_bit() -> None:
    anchor, momentum = start().anchor.numpy(), np.zeros(SIZE, np.float32)

    ours = run(start(), gradients())
    for gradient in gradients():
        anchor, momentum = reference.nesterov(anchor, momentum, gradient.numpy(), dtype=np.float32)

    assert ours.anchor.numpy().tobytes() == anchor.tobytes()
    assert ours.momentum.numpy().tobytes() == momentum.tobytes()


def test_twenty_steps_equal_torchs_nesterov_to_float32_rounding() -> None:
    parameter = torch.nn.Parameter(start().anchor.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)

    ours = run(start(), gradients())
    for gradient in gradients():
        parameter.grad = gradient
        optimizer.step()

    torch.testing.assert_close(ours.anchor, parameter.detach(), rtol=1e-5, atol=2e-5)


def test_the_step_is_the_same_to_the_bit_whatever_the_number_of_threads() -> None:
    size = 1 << 18
    generator = torch.Generator().manual_seed(4)
    anchor, momentum, gradient = (torch.randn(size, generator=generator) for _ in range(3))
    num_threads = torch.get_num_threads()

    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            step = nesterov_step(FragmentState(anchor, momentum), gradient, config=NesterovConfig())
            results.append(step.anchor.numpy().tobytes() + step.momentum.numpy().tobytes())
    finally:
        torch.set_num_threads(num_threads)

    assert results[0] == results[1] == results[2]


def test_a_piece_of_the_vector_gives_the_same_bytes_as_the_whole() -> None:
    state, gradient = start(), gradients()[0]

    whole = nesterov_step(state, gradient, config=NesterovConfig()).anchor
    pieces = [
        nesterov_step(
            FragmentState(state.anchor[part], state.momentum[part]),
            gradient[part],
            config=NesterovConfig(),
        ).anchor
        for part in (slice(0, 3), slice(3, 130), slice(130, SIZE))
    ]

    assert torch.equal(torch.cat(pieces), whole)


def test_the_state_before_the_step_is_left_as_it_is() -> None:
    state, untouched = start(), start()
    gradient = gradients()[0]

    nesterov_step(state, gradient, config=NesterovConfig())

    assert torch.equal(state.anchor, untouched.anchor)
    assert torch.equal(state.momentum, untouched.momentum)
    assert torch.equal(gradient, gradients()[0])


def test_it_finds_the_minimum_of_a_quadratic() -> None:
    curvature = torch.linspace(0.1, 1.0, SIZE)
    minimum = start(seed=9).anchor
    state = start()

    for _ in range(300):
        state = nesterov_step(state, curvature * (state.anchor - minimum), config=NesterovConfig())

    assert torch.allclose(state.anchor, minimum, atol=1e-4)


def test_one_peer_with_rate_1_and_no_momentum_lands_on_its_local_parameters() -> None:
    state, local = start(), start(seed=2).anchor
    gradient = torch.empty(SIZE)

    pseudo_gradient_(gradient, state.anchor, local)
    after = nesterov_step(state, gradient, config=NesterovConfig(lr=1.0, momentum=0.0))

    torch.testing.assert_close(after.anchor, local, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_pseudo_gradient_is_anchor_minus_local_in_float32(dtype: torch.dtype) -> None:
    anchor, local = start().anchor, start(seed=2).anchor.to(dtype)
    out = torch.full((SIZE,), float("nan"))

    pseudo_gradient_(out, anchor, local)

    expected = anchor.numpy() - local.float().numpy()
    assert out.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, SIZE // 2, SIZE - 1])
def test_an_average_that_is_not_finite_is_refused(bad: float, position: int) -> None:
    gradient = gradients()[0]
    gradient[position] = bad

    with pytest.raises(FloatingPointError, match="not finite"):
        nesterov_step(start(), gradient, config=NesterovConfig())


@given(st.lists(st.floats(width=32), max_size=20))
def test_finite_means_every_element_is(values: list[float]) -> None:
    answer = is_finite(torch.tensor(values, dtype=torch.float32))

    assert answer == bool(np.isfinite(np.asarray(values, dtype=np.float32)).all())
