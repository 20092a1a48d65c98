"""The 8-bit wire format: what it keeps, what it loses, what it refuses."""

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from opendiloco.averaging.codecs import CODECS
from tests.support.codecs import (
    BLOCK,
    INFINITY,
    LARGEST,
    SIZES,
    SMALLEST,
    decoded,
    normal,
    vector,
    vectors,
)

INT8 = CODECS["int8"]

Array = np.ndarray[Any, Any]


def int8_reference(values: torch.Tensor) -> tuple[Array, Array]:
    """Return scales and multiples; every operation in float64, rounded as the format says."""
    scales: list[float] = []
    multiples: list[float] = []
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK].double().numpy()
        mantissa, exponent = np.frexp(float(np.float32(abs(block).max() / 127)))
        scale = float(np.ldexp(np.floor(mantissa * 2**17), exponent - 17))
        scales.append(scale if scale >= 2.0**-100 else 0.0)
        ratios = (block / (scales[-1] or INFINITY)).astype(np.float32)
        multiples.extend(np.rint(ratios.astype(np.float64)))
    return np.array(scales), np.array(multiples)


@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("size", SIZES)
def test_int8_equals_the_reference(size: int, scale: float) -> None:
    values = normal(size, scale=scale)
    scales, multiples = int8_reference(values)

    payload = INT8.encode(values).payload

    assert payload == scales.astype("<f4").tobytes() + multiples.astype(np.int8).tobytes()


@pytest.mark.parametrize("scale", [1.0, 70001 * 2.0**-20, 130647 * 2.0**-30])  # 17 bits at most
def test_int8_rounds_halves_to_even_whatever_the_scale(scale: float) -> None:
    values = vector(127 * scale, *((low + 0.5) * scale for low in range(64)))

    payload = INT8.encode(values).payload

    even = bytes(low + low % 2 for low in range(64))
    assert payload == struct.pack("<f", scale) + b"\x7f" + even


@given(values=vectors)
def test_int8_decodes_exact_multiples_of_the_scale(values: torch.Tensor) -> None:
    scales, multiples = int8_reference(values)

    ours = decoded(INT8, INT8.encode(values).payload, len(values))

    exact = np.repeat(scales, BLOCK)[: len(values)] * multiples
    assert ours.double().tolist() == exact.tolist()


@pytest.mark.parametrize("size", SIZES[1:])
def test_int8_loses_less_than_a_hundredth_of_normal_values(size: int) -> None:
    values = normal(size)

    lost = decoded(INT8, INT8.encode(values).payload, size).double() - values.double()

    assert lost.square().mean().sqrt() <= 0.01 * values.double().square().mean().sqrt()


def test_int8_keeps_one_blocks_outlier_from_the_others() -> None:
    values = normal(3 * BLOCK)
    values[BLOCK] = 1e6

    ours = decoded(INT8, INT8.encode(values).payload, len(values))

    lost = (ours - values)[[*range(BLOCK), *range(2 * BLOCK, 3 * BLOCK)]]
    assert lost.abs().max() < 0.02 * 1e-3


@pytest.mark.parametrize("largest", [SMALLEST, 127 * SMALLEST, 190 * SMALLEST, 2.0**-126, 1e-30])
def test_int8_flushes_and_counts_a_block_of_hardly_anything(largest: float) -> None:
    values = torch.cat([normal(BLOCK), vector(largest, -largest / 2, 0.0)])

    encoded = INT8.encode(values)

    assert decoded(INT8, encoded.payload, len(values))[BLOCK:].tolist() == [0.0, 0.0, 0.0]
    assert encoded.num_flushed == int((values != 0).sum()) - int(
        np.count_nonzero(int8_reference(values)[1])
    )


def test_int8_counts_what_is_less_than_half_a_multiple() -> None:
    encoded = INT8.encode(vector(127.0, 0.5, -0.4, SMALLEST, 0.51, 0.0, -0.0))

    assert (encoded.num_clipped, encoded.num_flushed) == (0, 3)


def test_int8_holds_the_largest_float32() -> None:
    ours = decoded(INT8, INT8.encode(vector(LARGEST, -LARGEST)).payload, 2)

    assert ours[0] == -ours[1]
    assert LARGEST * (1 - 2.0**-15) < ours[0] <= LARGEST


def test_int8_gives_the_same_payload_again_whatever_the_scale() -> None:
    values = normal(4000 * BLOCK).view(-1, BLOCK)
    values = (values * torch.logspace(-20, 30, 4000).unsqueeze(1)).flatten()
    payload = INT8.encode(values).payload

    again = INT8.encode(decoded(INT8, payload, len(values))).payload

    assert again == payload


@pytest.mark.parametrize(
    "scale", [float("nan"), INFINITY, -INFINITY, -1.0, -SMALLEST, SMALLEST, 1e-35, LARGEST]
)
def test_a_scale_that_cannot_be_is_refused(scale: float) -> None:
    payload = struct.pack("<2f", 1.0, scale) + bytes([1] * (BLOCK + 1))
    out = torch.full((BLOCK + 1,), 7.0)

    with pytest.raises(ValueError, match="scale"):
        INT8.decode_(payload, out)

    assert set(out.tolist()) == {7.0}
