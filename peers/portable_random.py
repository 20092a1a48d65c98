"""Random tensors that come out the same on every kind of machine."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override


class PortableRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws normal_ and uniform_ from numpy's PCG64 in float64, then rounds.

    torch 2.13 gives other float32 bytes with AVX2 than without it, so machines of two kinds
    would start from different parameters with the same seed.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = np.random.Generator(np.random.PCG64(seed))

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.normal_.default:
            return self._fill(args[0], self._generator.normal, *args[1:])
        if func is torch.ops.aten.uniform_.default:
            return self._fill(args[0], self._generator.uniform, *args[1:])
        return func(*args, **(kwargs or {}))

    def _fill(
        self,
        tensor: torch.Tensor,
        draw: Callable[[float, float, tuple[int, ...]], npt.NDArray[np.float64]],
        first: float | None = None,
        second: float = 1.0,
    ) -> torch.Tensor:
        values = draw(0.0 if first is None else first, second, tuple(tensor.shape))
        return tensor.copy_(torch.from_numpy(np.asarray(values)))
