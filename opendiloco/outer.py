"""The outer step: pseudo-gradient and Nesterov update, as pure functions."""

from dataclasses import dataclass

import torch

from opendiloco.state import FragmentState

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
    state: FragmentState, gradient: torch.Tensor, *, config: NesterovConfig
) -> FragmentState:
    """Return the fragment after one Nesterov update; ``state`` is left as it is.

    ``v' = mu * v + g`` and ``anchor' = anchor - lr * (g + mu * v')``, as single float32
    multiplications and additions, so that every processor computes the same bytes.

    Args:
        state: Anchor and momentum that every averaging peer started from.
        gradient: The swarm's averaged pseudo-gradient, flat float32 on CPU.
        config: Learning rate and momentum.

    Raises:
        FloatingPointError: If any value of ``gradient`` is not finite.

    Source:
        arXiv:2311.08105, Algorithm 1, "outer optimization"; the update of
        ``torch.optim.SGD(nesterov=True)``, which the tests use as the reference.
    """
    if not is_finite(gradient):
        raise FloatingPointError("the averaged pseudo-gradient has values that are not finite")
    momentum = torch.mul(state.momentum, config.momentum)
    momentum.add_(gradient)
    anchor = torch.mul(momentum, config.momentum)
    anchor.add_(gradient)
    anchor.mul_(config.lr)
    torch.sub(state.anchor, anchor, out=anchor)
    return FragmentState(anchor=anchor, momentum=momentum)


def is_within_bounds(anchor: torch.Tensor, local: torch.Tensor) -> bool:
    """Return whether ``anchor - local`` is finite and nowhere beyond :data:`LARGEST_CHANGE`.

    Args:
        anchor: Float32 on CPU.
        local: Same shape; any floating dtype and device.
    """
    if anchor.numel() == 0:
        return True
    low, high = torch.aminmax(anchor - local.to("cpu", torch.float32))
    return bool((low >= -LARGEST_CHANGE) & (high <= LARGEST_CHANGE))  # false for NaN


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all elements are finite, without a temporary of the same size."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
