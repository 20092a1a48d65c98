"""What a peer publishes about itself: a small record, checked field by field."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

PROTOCOL_VERSION = 1
"""Peers of different versions do not see each other's records."""

MAX_RECORD_BYTES = 2048

PeerState = Literal["joining", "training", "averaging", "leaving"]

_Count = Annotated[int, Field(ge=0, le=2**60)]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("not printable: it could disturb a terminal or a page")
    return text


_Name = Annotated[str, Field(max_length=40), AfterValidator(_printable)]
_Term = Annotated[str, Field(max_length=64), AfterValidator(_printable)]
_Rate = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


class PeerRecord(BaseModel):
    """One peer's progress, as it says itself.

    Attributes:
        peer_id: libp2p identity; must be the one that signed the record.
        sequence: Grows with every publication: a peer whose record does not change is gone.
        state: What it is doing.
        outer_step: Committed outer steps.
        inner_step: Inner steps since the export for the last committed round.
        num_tokens: Tokens that this peer trained on since it started.
        tokens_per_second: Recent speed.
        ready_in_s: Expected seconds until its next round, at the time of publication.
        loss: Recent training loss in nats per token.
        digest: Leading hex digits of the digest of its outer state.
        fingerprint: Hash of the terms below.
        terms: The settings that all peers of a run must share, readable.
        client_mode: Whether others cannot dial it.
        version: Software version.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    peer_id: Annotated[str, Field(max_length=128), AfterValidator(_printable)]
    sequence: _Count = 0
    name: _Name = ""
    state: PeerState = "joining"
    outer_step: _Count = 0
    inner_step: _Count = 0
    num_tokens: _Count = 0
    tokens_per_second: _Rate = 0.0
    ready_in_s: _Rate = 0.0
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    digest: Annotated[str, Field(max_length=16), AfterValidator(_printable)] = ""
    fingerprint: _Term = ""
    terms: Annotated[dict[_Name, _Term], Field(max_length=24)] = Field(default_factory=dict)
    client_mode: bool = False
    version: _Name = ""

    def encode(self) -> bytes:
        """Return the record as bytes for the DHT.

        Raises:
            ValueError: If it would be larger than others accept.
        """
        encoded = self.model_dump_json().encode()
        if len(encoded) > MAX_RECORD_BYTES:
            raise ValueError(f"progress record of {len(encoded)} bytes; {MAX_RECORD_BYTES} fit")
        return encoded


def decode_record(encoded: object) -> PeerRecord | None:
    """Return the record that another peer published, or None when it is not one.

    Args:
        encoded: Whatever was found in the DHT.
    """
    if not isinstance(encoded, bytes) or len(encoded) > MAX_RECORD_BYTES:
        return None
    try:
        return PeerRecord.model_validate_json(encoded)
    except ValidationError:
        return None
