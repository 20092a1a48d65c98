"""DiLoCo written a second time, in numpy alone: where tests take their expected values from.

Everything is float64 unless a dtype is given, from the formulas of arXiv:2311.08105,
Algorithm 1. Nothing of the code under test is imported here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.floating]

OUTER_LR = 0.7
MOMENTUM = 0.9


def weighted_mean(contributions: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return the mean of equally long vectors, each counted with its weight."""
    stacked = np.stack([np.asarray(vector, dtype=np.float64) for vector in contributions])
    shares = np.asarray(weights, dtype=np.float64)
    return (shares[:, None] * stacked).sum(axis=0) / shares.sum()


def nesterov(
    anchor: Vector,
    momentum: Vector,
    gradient: Vector,
    *,
    lr: float = OUTER_LR,
    beta: float = MOMENTUM,
    dtype: npt.DTypeLike = np.float64,
) -> tuple[Vector, Vector]:
    """Return anchor and momentum after ``v = beta v + g; x = x - lr (g + beta v)``.

    With float32 every multiplication and addition is rounded on its own.
    """
    kind = np.dtype(dtype).type
    x, v, g = (np.asarray(vector, dtype=dtype) for vector in (anchor, momentum, gradient))
    v = kind(beta) * v + g
    return x - kind(lr) * (kind(beta) * v + g), v


def outer_step(
    anchor: Vector, momentum: Vector, locals_: Sequence[Vector], weights: Sequence[float]
) -> tuple[Vector, Vector]:
    """Return anchor and momentum after the peers at ``locals_`` have averaged."""
    start = np.asarray(anchor, dtype=np.float64)
    pseudo_gradients = [start - np.asarray(local, dtype=np.float64) for local in locals_]
    return nesterov(start, momentum, weighted_mean(pseudo_gradients, weights))


@dataclass(frozen=True)
class Trajectory:
    """Anchors and momenta after 0, 1, ... outer steps."""

    anchors: list[Vector]
    momenta: list[Vector]


def trajectory(
    anchor: Vector,
    deltas: Sequence[Sequence[Vector]],
    weights: Sequence[Sequence[float]],
) -> Trajectory:
    """Run DiLoCo on given local progress.

    Args:
        anchor: Where everybody starts.
        deltas: For each outer step and peer, what its inner steps added to the anchor.
        weights: For each outer step and peer, its weight in the average.
    """
    anchors = [np.asarray(anchor, dtype=np.float64)]
    momenta = [np.zeros_like(anchors[0])]
    for step_deltas, step_weights in zip(deltas, weights, strict=True):
        locals_ = [anchors[-1] + delta for delta in step_deltas]
        x, v = outer_step(anchors[-1], momenta[-1], locals_, step_weights)
        anchors.append(x)
        momenta.append(v)
    return Trajectory(anchors, momenta)
