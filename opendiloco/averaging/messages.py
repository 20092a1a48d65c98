"""What members tell each other to agree on an average: small, checked field by field."""

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opendiloco.averaging.codecs import Payload
from opendiloco.averaging.frames import MAX_MEMBERS, FrameKind

_MemberIndex = Annotated[int, Field(ge=0, lt=MAX_MEMBERS)]
_PartIndex = Annotated[int, Field(ge=0, lt=2**31)]
_Reason = Annotated[str, Field(max_length=200)]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Status(_Message):
    """A member's situation, for the coordinator.

    Attributes:
        serial: A member's later status replaces its earlier ones.
        view: Latest view that it accepted, and since when it finishes no parts.
        have: Parts of which it has the average, as a bit set in hex.
        vote: Digest of the whole average, once it has it; it never votes twice.
        suspects: Members that it cannot work with, and why.
    """

    serial: Annotated[int, Field(ge=0, lt=2**40)]
    view: Annotated[int, Field(ge=0, lt=2**40)]
    have: Annotated[str, Field(pattern="^[0-9a-f]+$", max_length=1 << 20)] = "0"
    vote: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    suspects: dict[_MemberIndex, _Reason] = {}

    @property
    def parts(self) -> int:
        """The parts that it has, as a bit set."""
        return int(self.have, 16)


class View(_Message):
    """Who takes part no more. Later views exclude more.

    Attributes:
        number: Counts views; a later coordinator's are always higher.
        excluded: Members that are out of this exchange, and why.
    """

    number: Annotated[int, Field(ge=0, lt=2**40)]
    excluded: dict[_MemberIndex, _Reason]


class Plan(_Message):
    """Where every part comes from that some member of the view misses.

    Attributes:
        view: The view that it belongs to.
        holders: For parts that somebody has: who gives them to the others.
        reducers: For parts that nobody has: who averages them anew.
    """

    view: Annotated[int, Field(ge=0, lt=2**40)]
    holders: dict[_PartIndex, _MemberIndex] = {}
    reducers: dict[_PartIndex, _MemberIndex] = {}


class Commit(_Message):
    """The average with this digest is decided; it can no longer change."""

    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Abort(_Message):
    """There will be no average."""

    reason: _Reason


class Leave(_Message):
    """The sender takes part no more."""

    reason: _Reason


class Want(_Message):
    """Parts that the sender misses and asks for."""

    parts: list[_PartIndex]


Message: TypeAlias = Status | View | Plan | Commit | Abort | Leave | Want

_KINDS: dict[type[Message], FrameKind] = {
    Status: FrameKind.STATUS,
    View: FrameKind.VIEW,
    Plan: FrameKind.PLAN,
    Commit: FrameKind.COMMIT,
    Abort: FrameKind.ABORT,
    Leave: FrameKind.LEAVE,
    Want: FrameKind.WANT,
}
_CLASSES = {kind: message for message, kind in _KINDS.items()}


def encode_message(message: Message) -> tuple[FrameKind, bytes]:
    """Return kind and payload of the frame that carries a message."""
    return _KINDS[type(message)], message.model_dump_json().encode()


def decode_message(kind: FrameKind, payload: Payload) -> Message:
    """Return the message in a frame.

    Raises:
        ValueError: If the frame carries none, or one that makes no sense.
    """
    if kind not in _CLASSES:
        raise ValueError(f"a frame of kind {kind.name} carries no message")
    try:
        # JSON has only text as keys, which strict validation of Python objects would refuse.
        return _CLASSES[kind].model_validate_json(bytes(payload))
    except ValidationError:
        raise ValueError(f"a {kind.name} message makes no sense") from None


def short_reason(text: str) -> str:
    """Return a reason cut to what a message may carry."""
    return text[:200]
