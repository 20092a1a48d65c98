"""The formats in which vectors travel: the same values give the same bytes everywhere."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

Payload: TypeAlias = bytes | bytearray | memoryview
"""What was received."""

_LARGEST_HALF = 65504.0

_CHUNK_ELEMENTS = 1 << 14
"""Torch converts less than 32,768 elements in the calling thread. More would go to a pool of
threads, which a forked process has lost: it would wait for them for ever."""

_LEVELS = np.float32(127)

_SMALLEST_SCALE = np.float32(2.0**-100)
"""Far from subnormals, which some processors take for zero."""

_LARGEST_SCALE = np.finfo(np.float32).max / _LEVELS


class Encoded(NamedTuple):
    """What :meth:`Codec.encode` makes of a vector.

    Attributes:
        payload: The bytes on the wire; they share no memory with the vector.
        num_clipped: How many values were cut to the largest that the format has.
        num_flushed: How many values other than zero became zero.
    """

    payload: bytes | memoryview
    num_clipped: int
    num_flushed: int


class Codec(Protocol):
    """One format of vectors on the wire; everything in it is little-endian.

    Encoding rounds to nearest, ties to even. It depends on nothing but the values: not on the
    processor, the number of threads or the versions of libraries. What was decoded encodes to
    the payload that it came from. Objects have no state: threads can share them.

    Attributes:
        name: What peers call the format.
        block_elements: Elements that are encoded together. A vector that is encoded in parts
            is cut at multiples of it.
    """

    name: str
    block_elements: int

    def encoded_size(self, num_elements: int) -> int:
        """Return how many bytes a vector of so many elements takes."""
        ...

    def encode(self, values: torch.Tensor) -> Encoded:
        """Return the values as bytes.

        Args:
            values: Flat contiguous float32 on CPU.

        Raises:
            ValueError: If it is no such tensor, or any value is not finite.
        """
        ...

    def decode_(self, payload: Payload, out: torch.Tensor) -> None:
        """Write what the payload stands for into ``out``.

        The payload may come from anybody: where the format has NaN or infinities, so may
        ``out`` afterwards.

        Args:
            payload: What a peer's :meth:`encode` returned.
            out: Overwritten; flat contiguous float32 on CPU, of the vector's length.

        Raises:
            ValueError: If ``out`` is no such tensor, or the payload has the wrong size or
                could not come from :meth:`encode`; ``out`` is left as it was.
        """
        ...


class Float32Codec:
    """Every value as it is."""

    name = "none"
    block_elements = 1

    def encoded_size(self, num_elements: int) -> int:
        """Return 4 bytes per element."""
        return 4 * num_elements

    def encode(self, values: torch.Tensor) -> Encoded:
        """Return the values as float32."""
        array = _as_array(values)
        _largest_magnitude(array)
        return Encoded(array.astype("<f4", copy=False).tobytes(), 0, 0)

    def decode_(self, payload: Payload, out: torch.Tensor) -> None:
        """Copy the float32 values of the payload."""
        array = _as_array(out)
        _check_size(payload, self.encoded_size(array.size))
        np.copyto(array, np.frombuffer(payload, "<f4"))


class Float16Codec:
    """Every value as IEEE half: 11 bits of precision from 6e-5 on, zero below 3e-8."""

    name = "fp16"
    block_elements = 1

    def encoded_size(self, num_elements: int) -> int:
        """Return 2 bytes per element."""
        return 2 * num_elements

    def encode(self, values: torch.Tensor) -> Encoded:
        """Return the values as float16; magnitudes above 65504 become 65504."""
        array = _as_array(values)
        num_clipped = 0
        if _largest_magnitude(array) > _LARGEST_HALF:
            num_clipped = int(np.count_nonzero(np.abs(array) > _LARGEST_HALF))
            values = torch.from_numpy(array.clip(-_LARGEST_HALF, _LARGEST_HALF))
        halves = torch.empty(array.size, dtype=torch.float16)
        _convert_(halves, values)
        num_flushed = _count_nonzero(array) - _count_nonzero(halves.numpy())
        payload = halves.numpy().astype("<f2", copy=False).tobytes()
        return Encoded(payload, num_clipped, num_flushed)

    def decode_(self, payload: Payload, out: torch.Tensor) -> None:
        """Widen the float16 values of the payload, which is exact."""
        _check_size(payload, self.encoded_size(_as_array(out).size))
        # A copy, because torch insists on memory that it may write to.
        halves = np.frombuffer(payload, "<f2").astype(np.float16)
        _convert_(out, torch.from_numpy(halves))


class Int8Codec:
    """Whole multiples of a scale, from -127 to 127, with a scale per block of 256.

    The payload has the scales of all blocks as float32, then a byte per element; the last block
    may be shorter. The scale is the block's largest magnitude / 127, cut off after 17
    significant bits: every multiple is then a float32, so that decoding does not round. A
    block of values around 1e-28 or less becomes zero.

    Relative error of the norm, for normally distributed values: 0.7 %.
    """

    name = "int8"
    block_elements = 256

    def encoded_size(self, num_elements: int) -> int:
        """Return 1 byte per element and 4 per block."""
        return 4 * self._num_blocks(num_elements) + num_elements

    def encode(self, values: torch.Tensor) -> Encoded:
        """Return scales and multiples; nothing is clipped."""
        array = _as_array(values)
        blocks = self._blocks(array)
        largest = np.abs(blocks).max(axis=1)
        if not np.isfinite(largest).all():
            raise ValueError("the vector has values that are not finite")
        scales = (largest / _LEVELS).view(np.int32) & ~0x7F
        scales = scales.view(np.float32)
        scales[scales < _SMALLEST_SCALE] = 0.0
        divisors = np.where(scales == 0.0, np.float32(1), scales)
        multiples = np.rint(blocks / divisors[:, np.newaxis]).astype(np.int8)
        multiples = multiples.reshape(-1)[: array.size]
        num_flushed = _count_nonzero(array) - int(np.count_nonzero(multiples))
        payload = scales.astype("<f4", copy=False).tobytes() + multiples.tobytes()
        return Encoded(payload, 0, num_flushed)

    def decode_(self, payload: Payload, out: torch.Tensor) -> None:
        """Multiply every element with its block's scale, which is exact."""
        array = _as_array(out)
        _check_size(payload, self.encoded_size(array.size))
        num_blocks = self._num_blocks(array.size)
        scales = np.frombuffer(payload, "<f4", count=num_blocks)
        is_possible = (scales >= _SMALLEST_SCALE) & (scales <= _LARGEST_SCALE)
        if not (is_possible | (scales == 0.0)).all():
            raise ValueError("the payload has a scale that cannot be")
        multiples = self._blocks(np.frombuffer(payload, np.int8, offset=4 * num_blocks))
        array[:] = (multiples * scales[:, np.newaxis]).reshape(-1)[: array.size]

    def _num_blocks(self, num_elements: int) -> int:
        return -(-num_elements // self.block_elements)

    def _blocks(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the array as rows of a block each; zeros fill up the last one."""
        missing = -array.size % self.block_elements
        if missing:
            array = np.concatenate([array, np.zeros(missing, array.dtype)])
        return array.reshape(-1, self.block_elements)


CODECS: Mapping[str, Codec] = MappingProxyType(
    {"none": Float32Codec(), "fp16": Float16Codec(), "int8": Int8Codec()}
)
"""Every format by its name."""


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor's memory as an array."""
    is_flat = tensor.dim() == 1 and tensor.is_contiguous()
    if not is_flat or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise ValueError(
            "a codec takes flat contiguous float32 on the CPU, "
            f"not {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )
    return tensor.numpy()


def _check_size(payload: Payload, expected: int) -> None:
    size = memoryview(payload).nbytes
    if size != expected:
        raise ValueError(f"the payload has {size} bytes instead of {expected}")


def _largest_magnitude(array: np.ndarray[Any, Any]) -> float:
    """Return the largest absolute value; raise if any is not finite."""
    largest = np.maximum(-array.min(initial=0.0), array.max(initial=0.0))
    if not np.isfinite(largest):
        raise ValueError("the vector has values that are not finite")
    return float(largest)


def _count_nonzero(array: np.ndarray[Any, Any]) -> int:
    """Count floats that are neither 0 nor -0: by their bits, which is exact and fast."""
    bits = array.view(f"u{array.itemsize}")
    return int(np.count_nonzero(bits << 1))


def _convert_(out: torch.Tensor, values: torch.Tensor) -> None:
    """Write the values into ``out`` as its type, in the calling thread."""
    for begin in range(0, len(out), _CHUNK_ELEMENTS):
        end = begin + _CHUNK_ELEMENTS
        out[begin:end].copy_(values[begin:end])
