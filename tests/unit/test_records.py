"""Progress records: what strangers may publish, and that nothing else gets through."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.progress.records import MAX_RECORD_BYTES, PeerRecord, decode_record

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

VALID: dict[str, Json] = {
    "peer_id": "12D3KooWHHzSeKaY8xuZVzkLbKFfvNgPPeKhFBGrMbNzbm5akpqu",
    "sequence": 4,
    "name": "rented-3090",
    "state": "training",
    "outer_step": 7,
    "inner_step": 120,
    "num_tokens": 123_456_789,
    "tokens_per_second": 5120.5,
    "ready_in_s": 33.0,
    "loss": 3.25,
    "digest": "0123456789abcdef",
    "fingerprint": "f" * 64,
    "terms": {"diloco.inner-steps": "500"},
    "client_mode": False,
    "version": "0.1.0",
}

COUNTS = ("sequence", "outer_step", "inner_step", "num_tokens")
RATES = ("tokens_per_second", "ready_in_s")
LONGEST = {"peer_id": 128, "name": 40, "digest": 16, "fingerprint": 64, "version": 40}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner),
    max_leaves=10,
)


def published(**changes: Json) -> bytes:
    return json.dumps(VALID | changes).encode()


def test_a_record_comes_back_as_it_was_published() -> None:
    record = PeerRecord.model_validate(VALID)

    assert decode_record(record.encode()) == record
    assert json.loads(record.encode()) == VALID


def test_only_the_peer_id_is_needed() -> None:
    record = decode_record(b'{"peer_id": "a"}')

    assert record == PeerRecord(peer_id="a")


def test_a_record_without_a_peer_id_is_refused() -> None:
    fields = {name: value for name, value in VALID.items() if name != "peer_id"}

    assert decode_record(json.dumps(fields).encode()) is None


def test_a_field_of_a_later_version_is_ignored() -> None:
    assert decode_record(published(altitude=12)) == PeerRecord.model_validate(VALID)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, 2**60])
def test_a_count_within_its_bounds_is_accepted(name: str, value: int) -> None:
    record = decode_record(published(**{name: value}))

    assert record is not None
    assert getattr(record, name) == value


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    "value", [-1, 2**60 + 1, 10**400, 1.5, 3.0, "3", True, None, [3], {}, float("nan")]
)
def test_a_count_out_of_bounds_or_of_another_type_is_refused(name: str, value: Json) -> None:
    assert decode_record(published(**{name: value})) is None


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("value", [0, 0.0, 12, 1e15])
def test_a_rate_within_its_bounds_is_accepted(name: str, value: float) -> None:
    record = decode_record(published(**{name: value}))

    assert record is not None
    assert getattr(record, name) == value


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize(
    "value", [-1e-9, 1.1e15, float("nan"), float("inf"), "3", True, None, [3.0], {}]
)
def test_a_rate_out_of_bounds_or_of_another_type_is_refused(name: str, value: Json) -> None:
    assert decode_record(published(**{name: value})) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "3", True, [], {}])
def test_a_loss_that_is_no_finite_number_is_refused(value: Json) -> None:
    assert decode_record(published(loss=value)) is None


@pytest.mark.parametrize("value", [None, 0, -0.5, 11.25])
def test_a_loss_is_a_number_or_not_known(value: float | None) -> None:
    record = decode_record(published(loss=value))

    assert record is not None
    assert record.loss == value


@pytest.mark.parametrize(("name", "longest"), LONGEST.items())
def test_a_text_may_be_as_long_as_its_bound_and_no_longer(name: str, longest: int) -> None:
    longest_record = decode_record(published(**{name: "x" * longest}))

    assert longest_record is not None
    assert decode_record(published(**{name: "x" * (longest + 1)})) is None


@pytest.mark.parametrize("name", [*LONGEST, "state"])
@pytest.mark.parametrize("value", [None, 3, True, ["x"], {"x": "y"}])
def test_a_text_of_another_type_is_refused(name: str, value: Json) -> None:
    assert decode_record(published(**{name: value})) is None


@pytest.mark.parametrize("field", ["name", "peer_id", "version", "digest"])
@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\x00"])
def test_a_text_that_could_disturb_a_terminal_is_refused(field: str, text: str) -> None:
    assert decode_record(published(**{field: text})) is None


@pytest.mark.parametrize("state", ["", "Training", "dead", "training "])
def test_a_state_that_there_is_not_is_refused(state: str) -> None:
    assert decode_record(published(state=state)) is None


@pytest.mark.parametrize("value", [None, 0, 1, "true", "no", []])
def test_client_mode_is_true_or_false(value: Json) -> None:
    assert decode_record(published(client_mode=value)) is None


@pytest.mark.parametrize(
    "terms",
    [
        None,
        [],
        "seed=1",
        {"seed": 1},
        {"seed": None},
        {"seed": "x" * 65},
        {"x" * 41: "1"},
        {f"term-{number}": "1" for number in range(25)},
    ],
)
def test_terms_that_are_not_few_short_texts_are_refused(terms: Json) -> None:
    assert decode_record(published(terms=terms)) is None


@pytest.mark.parametrize(
    "value",
    [None, 3, "text", [], {}, bytearray(published()), published().decode(), (published(),)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_bytes_is_no_record(value: object) -> None:
    assert decode_record(value) is None


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        published()[:-1],
        published() + b"}",
        b"\xff\xfe" + published(),
        b'{"peer_id": "\\ud800"}',
        b'{"peer_id": "\xed\xa0\x80"}',
        b'{"peer_id": "a", "outer_step": 1e400}',
        b'{"peer_id": "a", "loss": Infinity}',
        b"[" * 2000,
        b'{"terms":' * 200,
    ],
    ids=range(13),
)
def test_broken_json_is_no_record(encoded: bytes) -> None:
    assert decode_record(encoded) is None


def test_a_record_of_the_largest_size_is_accepted_and_one_more_byte_is_not() -> None:
    largest = published() + b" " * (MAX_RECORD_BYTES - len(published()))

    assert decode_record(largest) is not None
    assert decode_record(largest + b" ") is None


def test_a_record_with_every_field_at_its_longest_and_no_terms_fits() -> None:
    texts = {name: "\N{GRINNING FACE}" * longest for name, longest in LONGEST.items()}
    numbers = dict.fromkeys(COUNTS, 2**60) | dict.fromkeys(RATES, 1.2345678901234567e14)
    record = PeerRecord.model_validate(
        {**texts, **numbers, "state": "averaging", "loss": -1.2345678901234567e-300}
    )

    assert decode_record(record.encode()) == record


def test_a_record_that_others_would_not_accept_is_not_published() -> None:
    terms = {f"{number:>040}": "x" * 64 for number in range(24)}
    record = PeerRecord(peer_id="a", terms=terms)

    with pytest.raises(ValueError, match=r"progress record of \d+ bytes; 2048 fit"):
        record.encode()


@given(st.binary(max_size=300))
def test_no_bytes_raise_an_exception(encoded: bytes) -> None:
    assert decode_record(encoded) is None


@given(json_values)
def test_no_json_raises_an_exception(value: Json) -> None:
    record = decode_record(json.dumps(value).encode())

    assert record is None or isinstance(record, PeerRecord)


@given(st.sampled_from(sorted(VALID)), json_values)
def test_whatever_one_field_holds_the_result_is_within_bounds_or_nothing(
    name: str, value: Json
) -> None:
    record = decode_record(published(**{name: value}))

    if record is not None:
        assert record == PeerRecord.model_validate(record.model_dump())
        assert all(0 <= getattr(record, count) <= 2**60 for count in COUNTS)
        assert all(0 <= getattr(record, rate) <= 1e15 for rate in RATES)
        assert all(len(getattr(record, text)) <= longest for text, longest in LONGEST.items())
