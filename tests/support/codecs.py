"""What the tests of wire formats share."""

import numpy as np
import torch
from hypothesis import strategies as st

from opendiloco.averaging.codecs import Codec

BLOCK = 256
SIZES = [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 100_003]
SMALLEST = 2.0**-149  # of the float32 subnormals
LARGEST = float(np.finfo(np.float32).max)
INFINITY = float("inf")
EDGES = [0.0, -0.0, SMALLEST, -SMALLEST, 2.0**-126, 2.0**-25, 2.0**-24, 65504.0, 1e30, -LARGEST]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(EDGES)
vectors = st.lists(finite, max_size=BLOCK + 2).map(lambda values: vector(*values))


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def normal(size: int, *, scale: float = 1e-3) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(size))


def decoded(codec: Codec, payload: bytes | bytearray | memoryview, size: int) -> torch.Tensor:
    out = torch.full((size,), float("nan"))
    codec.decode_(payload, out)
    return out
