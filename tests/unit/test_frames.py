"""What travels between members: frames and the messages in them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.averaging.frames import (
    HEADER_BYTES,
    Frame,
    FrameKind,
    bits,
    indices_of,
    read_header,
)
from opendiloco.averaging.messages import (
    Commit,
    Plan,
    Status,
    View,
    Want,
    decode_message,
    encode_message,
)


@given(
    kind=st.sampled_from(FrameKind),
    tag=st.binary(min_size=8, max_size=8),
    part=st.integers(0, 2**32 - 1),
    version=st.integers(0, 2**32 - 1),
    contributors=st.sets(st.integers(0, 127)),
    payload=st.binary(max_size=100),
)
def test_a_header_reads_back_as_what_was_written(
    kind: FrameKind, tag: bytes, part: int, version: int, contributors: set[int], payload: bytes
) -> None:
    frame = Frame(kind, tag, part, version, bits(contributors), payload)

    read, length = read_header(frame.header(), max_payload_bytes=100)

    assert read.carrying(payload) == frame
    assert length == len(payload)
    assert set(indices_of(read.contributors)) == contributors
    assert frame.num_bytes == HEADER_BYTES + len(payload)


def test_a_frame_that_announces_too_much_is_refused() -> None:
    header = Frame(FrameKind.AVERAGE, b"8 bytes!", payload=bytes(101)).header()

    with pytest.raises(ValueError, match="101 bytes"):
        read_header(header, max_payload_bytes=100)


def test_a_frame_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="200"):
        read_header(b"\xc8" + bytes(HEADER_BYTES - 1), max_payload_bytes=100)


@pytest.mark.parametrize(
    "message",
    [
        Status(serial=3, view=2, have="ff", vote="0" * 64, suspects={4: "was silent"}),
        View(number=7, excluded={1: "was silent"}),
        Plan(view=7, holders={0: 1}, reducers={5: 2}),
        Commit(digest="a" * 64),
        Want(parts=[1, 2]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_reads_back_as_what_was_written(
    message: Status | View | Plan | Commit | Want,
) -> None:
    assert decode_message(*encode_message(message)) == message


GOOD_STATUS = {"serial": 1, "view": 0, "have": "0", "vote": "", "suspects": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"serial": -1},
        {"serial": 1.5},
        {"view": 2**40},
        {"have": "0x1"},
        {"have": "-1"},
        {"vote": "ff"},
        {"suspects": {"128": "there is no such member"}},
        {"suspects": {"1": "x" * 201}},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_status_with_a_senseless_field_is_refused(change: dict[str, object]) -> None:
    assert decode_message(FrameKind.STATUS, json.dumps(GOOD_STATUS).encode()) == Status(
        serial=1, view=0
    )

    with pytest.raises(ValueError, match="STATUS message makes no sense"):
        decode_message(FrameKind.STATUS, json.dumps({**GOOD_STATUS, **change}).encode())


@pytest.mark.parametrize("garbage", [b"", b"{", b"null", b"\xff\xfe"])
def test_garbage_is_refused_as_a_message(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        decode_message(FrameKind.VIEW, garbage)
