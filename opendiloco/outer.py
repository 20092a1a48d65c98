"""The outer step: pseudo-gradient and Nesterov update, as pure functions."""

from dataclasses import dataclass

import torch

from opendiloco.state import SLICE_ELEMENTS, FragmentState

LARGEST_CHANGE = 32752.0
"""Half of what float16 can hold, since a difference of two contributions travels, too. On the
wire more would be cut off silently; and a parameter that moved so far is beyond repair."""


@dataclass(frozen=True, slots=True)
class NesterovConfig:
    """Hyperparameters of the outer optimizer.

    Attributes:
        lr: Outer learning rate.
        momentum: Nesterov momentum.

    Source:
        Values of arXiv:2407.07852, section 3: 0.7 and 0.9.
    """

    lr: float = 0.7
    momentum: float = 0.9


def pseudo_gradient_(out: torch.Tensor, anchor: torch.Tensor, local: torch.Tensor) -> None:
    """Write ``anchor - local`` into ``out``.

    The sign makes a descent step on the result move the anchor towards the local
    parameters: with outer learning rate 1, no momentum and one peer, the new anchor is
    ``local`` up to float32 rounding.

    Args:
        out: Overwritten; float32 on CPU.
        anchor: Parameters at the last committed outer step; float32 on CPU.
        local: Parameters after the inner steps; any floating dtype and device.
            All three have the same shape.

    Source:
        Douillard et al. 2023, arXiv:2311.08105, Algorithm 1, "averaging outer gradients".
    """
    out.copy_(local)
    torch.sub(anchor, out, out=out)


def nesterov_step(
    state: FragmentState,
    gradient: torch.Tensor,
    *,
    config: NesterovConfig,
    in_place: bool = False,
) -> FragmentState:
    """Return the fragment after one Nesterov update.

    ``v' = mu * v + g`` and ``anchor' = anchor - lr * (g + mu * v')``, as single float32
    multiplications and additions, so that every processor computes the same bytes.

    Args:
        state: Anchor and momentum that every averaging peer started from.
        gradient: The swarm's averaged pseudo-gradient, flat float32 on CPU.
        config: Learning rate and momentum.
        in_place: Overwrite ``state``, which nobody else may be using.

    Raises:
        FloatingPointError: If any value of ``gradient`` is not finite.

    Source:
        arXiv:2311.08105, Algorithm 1, "outer optimization"; the update of
        ``torch.optim.SGD(nesterov=True)``, which the tests use as the reference.
    """
    if not is_finite(gradient):
        raise FloatingPointError("the averaged pseudo-gradient has values that are not finite")
    if in_place:
        after = FragmentState(state.anchor, state.momentum)
    else:
        after = FragmentState(state.anchor.clone(), state.momentum.clone())
    vectors = (after.anchor, after.momentum, gradient)
    slices = (torch.split(vector, SLICE_ELEMENTS) for vector in vectors)
    for anchor, momentum, mean in zip(*slices, strict=True):
        momentum.mul_(config.momentum)
        momentum.add_(mean)
        step = torch.mul(momentum, config.momentum)
        step.add_(mean)
        step.mul_(config.lr)
        anchor.sub_(step)
    return after


def is_within_bounds(anchor: torch.Tensor, local: torch.Tensor) -> bool:
    """Return whether ``anchor - local`` is finite and nowhere beyond :data:`LARGEST_CHANGE`.

    Args:
        anchor: Float32 on CPU.
        local: Same shape; any floating dtype and device.
    """
    return is_sound(anchor - local.to("cpu", torch.float32))


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all elements are finite, without a temporary of the same size."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def is_sound(change: torch.Tensor) -> bool:
    """Return whether all elements are finite and none is beyond :data:`LARGEST_CHANGE`."""
    if change.numel() == 0:
        return True
    low, high = torch.aminmax(change)
    # Written so that NaN, which is neither more nor less, is caught as well.
    return bool((low >= -LARGEST_CHANGE) & (high <= LARGEST_CHANGE))
