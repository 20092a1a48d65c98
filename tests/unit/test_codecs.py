"""Wire formats: the published arithmetic, the same bytes every time, nothing that cannot be."""

import multiprocessing
import struct
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given

from opendiloco.averaging.codecs import CODECS, Codec
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

NONE, FP16, INT8 = CODECS["none"], CODECS["fp16"], CODECS["int8"]

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def halves(values: torch.Tensor) -> bytes:
    return values.numpy().clip(-65504, 65504).astype("<f2").tobytes()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("codec", "values", "payload"),
    [
        (NONE, [1.0, -0.0, 0.1, SMALLEST], "0000803f 00000080 cdcccc3d 01000000"),
        (FP16, [0.0, -0.0, 1.0, -2.0, 0.1, 1e30], "0000 0080 003c 00c0 662e ff7b"),
        (INT8, [127.0, -126.5, 1.0, -1.0, 0.5, 1.5, -0.0], "0000803f 7f 82 01 ff 00 02 00"),
        (INT8, [-1.0, 0.25], "0002013c 81 20"),  # 1 / 127 is 3c010204 in float32
        (INT8, [0.0, 0.0], "00000000 00 00"),
    ],
)
def test_a_vector_has_these_bytes(codec: Codec, values: list[float], payload: str) -> None:
    encoded = codec.encode(vector(*values))

    assert encoded.payload.hex() == payload.replace(" ", "")


@every_codec
@pytest.mark.parametrize("size", SIZES)
def test_a_payload_has_the_promised_size(codec: Codec, size: int) -> None:
    encoded = codec.encode(normal(size))

    per_element = {"none": 4, "fp16": 2, "int8": 1}[codec.name]
    num_scales = len(range(0, size, BLOCK)) if codec.name == "int8" else 0
    assert len(encoded.payload) == per_element * size + 4 * num_scales
    assert codec.encoded_size(size) == len(encoded.payload)


@pytest.mark.parametrize("name", ["none", "fp16", "int8"])
def test_a_codec_knows_its_name(name: str) -> None:
    assert CODECS[name].name == name


@given(values=vectors)
def test_none_keeps_every_bit(values: torch.Tensor) -> None:
    encoded = NONE.encode(values)

    assert decoded(NONE, encoded.payload, len(values)).numpy().tobytes() == values.numpy().tobytes()
    assert encoded[1:] == (0, 0)


@given(values=vectors)
def test_fp16_rounds_as_numpy_does(values: torch.Tensor) -> None:
    assert FP16.encode(values).payload == halves(values)


def test_fp16_rounds_to_even_between_any_two_neighbours() -> None:
    magnitudes = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = torch.from_numpy((magnitudes[:-1] + magnitudes[1:]) / 2)
    values = torch.cat([middles, -middles])

    encoded = FP16.encode(values)

    even = [low + low % 2 for low in range(0x7BFF)]
    expected = struct.pack(f"<{2 * len(even)}H", *even, *(0x8000 | bits for bits in even))
    assert encoded.payload == expected


def test_fp16_decodes_every_number_that_it_has() -> None:
    numbers = np.arange(1 << 16, dtype="<u2").view("<f2")
    numbers = numbers[~np.isnan(numbers)]

    values = decoded(FP16, numbers.tobytes(), len(numbers))

    assert values.numpy().tobytes() == numbers.astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("value", "num_clipped", "num_flushed"),
    [
        (0.0, 0, 0),
        (-0.0, 0, 0),
        (SMALLEST, 0, 1),
        (-SMALLEST, 0, 1),
        (2.0**-25, 0, 1),  # half of the smallest, which ties to the even zero
        (-(2.0**-25), 0, 1),
        (np.nextafter(np.float32(2.0**-25), np.float32(1)), 0, 0),
        (2.0**-24, 0, 0),
        (65504.0, 0, 0),
        (-65504.0, 0, 0),
        (65504.0078125, 1, 0),
        (65519.99, 1, 0),
        (65520.0, 1, 0),
        (-1e30, 1, 0),
        (LARGEST, 1, 0),
    ],
)
def test_fp16_counts_what_it_clips_and_flushes(
    value: float, num_clipped: int, num_flushed: int
) -> None:
    encoded = FP16.encode(vector(1.0, value, value, 0.0))

    assert (encoded.num_clipped, encoded.num_flushed) == (2 * num_clipped, 2 * num_flushed)


def test_fp16_leaves_the_vector_that_it_clips_as_it_is() -> None:
    values = vector(1e30, 1.0)

    FP16.encode(values)

    assert values.tolist() == vector(1e30, 1.0).tolist()


@every_codec
def test_parts_cut_at_blocks_decode_to_the_same_as_the_whole(codec: Codec) -> None:
    values = normal(5 * BLOCK + 7)
    cut = 3 * codec.block_elements

    whole = decoded(codec, codec.encode(values).payload, len(values))
    parts = [
        decoded(codec, codec.encode(part).payload, len(part))
        for part in (values[:cut], values[cut:])
    ]

    assert torch.equal(torch.cat(parts), whole)


@every_codec
@given(values=vectors)
def test_what_was_decoded_encodes_to_the_same_payload(codec: Codec, values: torch.Tensor) -> None:
    payload = codec.encode(values).payload

    again = codec.encode(decoded(codec, payload, len(values)))

    assert again == (payload, 0, 0)


@every_codec
def test_the_number_of_threads_does_not_change_the_payload(codec: Codec, two_threads: None) -> None:
    values = normal(300_001)

    by_two = codec.encode(values).payload
    torch.set_num_threads(1)

    assert codec.encode(values).payload == by_two


@every_codec
def test_a_processor_that_flushes_subnormals_makes_the_same_payload(codec: Codec) -> None:
    tiny = [sign * SMALLEST * 2.0**i for i in range(40) for sign in (1, -1)]
    mixed = [value for small in tiny for value in (small, 0.7 * small, 1e-30, 2.0**-24)]
    values = vector(*mixed, *[0.0] * (-len(mixed) % BLOCK), *tiny)

    expected = codec.encode(values)
    torch.set_flush_denormal(True)
    try:
        flushing = codec.encode(values)
    finally:
        torch.set_flush_denormal(False)

    assert flushing == expected


@every_codec
def test_a_forked_process_encodes_what_its_parent_would(codec: Codec, two_threads: None) -> None:
    values = normal(300_001, scale=1.0).exp_()  # large enough to start torch's threads
    out = torch.zeros_like(values)
    payload = codec.encode(values).payload

    def encode() -> None:
        codec.decode_(payload, out)
        sys.exit(0 if codec.encode(out).payload == payload else 1)

    child = multiprocessing.get_context("fork").Process(target=encode)
    child.start()
    child.join(timeout=20)
    child.kill()
    child.join()

    assert child.exitcode == 0


@every_codec
def test_a_payload_does_not_change_with_the_vector(codec: Codec) -> None:
    values = normal(BLOCK)
    encoded = codec.encode(values)
    before = bytes(encoded.payload)

    values.fill_(1.0)

    assert encoded.payload == before


@every_codec
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_payload_may_lie_anywhere(codec: Codec, kind: type) -> None:
    payload = bytes(codec.encode(normal(BLOCK + 1)).payload)

    shifted = memoryview(b"x" + payload)[1:]

    expected = decoded(codec, payload, BLOCK + 1)
    assert torch.equal(decoded(codec, kind(shifted), BLOCK + 1), expected)


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), INFINITY, -INFINITY])
@pytest.mark.parametrize("index", [0, BLOCK, 40_000])
def test_what_is_not_finite_is_refused(codec: Codec, bad: float, index: int) -> None:
    values = normal(40_001)
    values[index] = bad

    with pytest.raises(ValueError, match="not finite"):
        codec.encode(values)


@every_codec
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, dtype=torch.float16),
        torch.zeros(2, 2),
        torch.tensor(1.0),
        torch.zeros(8)[::2],
        torch.zeros(4, device="meta"),
    ],
    ids=["float64", "float16", "matrix", "scalar", "strided", "elsewhere"],
)
def test_other_tensors_are_refused(codec: Codec, tensor: torch.Tensor) -> None:
    payload = bytes(codec.encoded_size(tensor.numel()))

    with pytest.raises(ValueError, match="flat contiguous float32"):
        codec.encode(tensor)
    with pytest.raises(ValueError, match="flat contiguous float32"):
        codec.decode_(payload, tensor)


@every_codec
@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("extra", [-1, 1])
def test_a_payload_of_the_wrong_size_is_refused(codec: Codec, size: int, extra: int) -> None:
    out = torch.ones(size)

    with pytest.raises(ValueError, match=f"instead of {codec.encoded_size(size)}"):
        codec.decode_(bytes(codec.encoded_size(size) + extra), out)

    assert torch.equal(out, torch.ones(size))
