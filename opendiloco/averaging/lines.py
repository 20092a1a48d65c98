"""One exchange's lines to its members: what is said, what is heard, and who is silent."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Protocol

from opendiloco.averaging.frames import Frame, FrameKind
from opendiloco.averaging.group import Group
from opendiloco.averaging.messages import Message, encode_message
from opendiloco.units import Seconds


class LinkLike(Protocol):
    """What an exchange needs of a link to a peer; see :mod:`opendiloco.averaging.links`."""

    was_heard: bool

    def post(self, frame: Frame) -> None:
        """Have a frame sent as soon as possible."""

    async def send(self, frame: Frame) -> None:
        """Have a bulk frame sent; returns when few enough others are waiting."""

    def forget(self, tag: bytes) -> None:
        """Do not send what is left of a round that is over, apart from messages."""

    async def flush(self) -> None:
        """Return when everything that was posted has been written."""

    def close(self) -> None:
        """End the link."""


Connect = Callable[[int], Awaitable[LinkLike]]
"""Returns the link to a member."""
Knock = Callable[[int], Awaitable[None]]
"""Returns when a member is seen to be there; raises whatever it likes when it is not."""

_RETURN = Seconds(3.0)  # for a member to come back whose link is lost
_RETURNS = 3  # of one member, in one exchange


class Lines:
    """Links to the members of one group.

    Attributes:
        bytes_sent: Of frames to others.
        bytes_received: Of frames from others; counted by the caller.
    """

    def __init__(self, group: Group, connect: Connect, *, stall: Seconds) -> None:
        self._group = group
        self._connect = connect
        self._stall = stall
        self._links: dict[int, LinkLike] = {}
        self._waiting: dict[int, list[Frame]] = {}  # for members without a link yet
        self._lost: set[int] = set()
        self._num_returns: Counter[int] = Counter()
        self._silence: dict[int, float] = {}
        self._ping_in = 0.0
        self.bytes_sent = 0
        self.bytes_received = 0

    def reaches(self, member: int) -> bool:
        """Return whether there is a link to a member."""
        return member in self._links

    async def attach(self, member: int) -> None:
        """Connect to a member, and send what has been posted to it meanwhile.

        Raises:
            ConnectionError: If that does not work in time.
        """
        with _connecting():
            async with asyncio.timeout(self._stall):
                link = await self._connect(member)
        self._use(member, link)

    async def reattach(self, member: int, knock: Knock) -> None:
        """Connect anew to a member whose link is lost; what was under way on it is lost, too.

        Raises:
            ConnectionError: If that does not work soon, at once if there is nobody.
        """
        self._links.pop(member, None)
        self._num_returns[member] += 1
        if self._num_returns[member] > _RETURNS:
            raise ConnectionError("the connection was lost again and again")
        with _connecting():
            async with asyncio.timeout(min(_RETURN, self._stall)):
                await knock(member)
                link = await self._connect(member)
        self._use(member, link)

    def _use(self, member: int, link: LinkLike) -> None:
        if member in self._lost:
            return
        link.was_heard = True
        self._silence[member] = 0.0
        self._links[member] = link
        for frame in self._waiting.pop(member, []):
            self.post(member, frame)

    def post(self, member: int, frame: Frame) -> None:
        """Have a frame sent to a member as soon as possible; to lost ones it goes nowhere."""
        link = self._links.get(member)
        if link is not None:
            self.bytes_sent += frame.num_bytes
            link.post(frame)
        elif member not in self._lost:
            self._waiting.setdefault(member, []).append(frame)

    async def send(self, member: int, frame: Frame) -> None:
        """Have a bulk frame sent to a member; returns when few enough others are waiting."""
        link = self._links.get(member)
        if link is None:
            self.post(member, frame)
        else:
            self.bytes_sent += frame.num_bytes
            await link.send(frame)

    def say(self, member: int, message: Message) -> None:
        """Send a message to a member."""
        kind, payload = encode_message(message)
        self.post(member, Frame(kind, self._group.tag, payload=payload))

    def say_to_all(self, message: Message) -> None:
        """Send a message to every member that there is a link to."""
        for member in list(self._links):
            self.say(member, message)

    def drop(self, members: Iterable[int]) -> None:
        """End the links to members that are lost."""
        for member in members:
            self._lost.add(member)
            self._waiting.pop(member, None)
            link = self._links.pop(member, None)
            if link is not None:
                link.close()

    def beat(self, slept: float) -> list[int]:
        """Show that this member is alive, and return those that have been silent for too long.

        Args:
            slept: Seconds since the last call during which this peer was awake: only they
                count as the others' silence.
        """
        self._ping_in -= slept
        ping = self._ping_in <= 0
        if ping:
            self._ping_in = self._stall / 4
        for member, link in self._links.items():
            self._silence[member] = 0.0 if link.was_heard else self._silence[member] + slept
            link.was_heard = False
            if ping:
                self.bytes_sent += Frame(FrameKind.PING, self._group.tag).num_bytes
                link.post(Frame(FrameKind.PING, self._group.tag))
        return [member for member in self._links if self._silence[member] > self._stall]

    async def flush(self, *, within: Seconds) -> None:
        """Return when everything has been written, or after this long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await asyncio.gather(*(link.flush() for link in self._links.values()))

    def forget(self) -> None:
        """Do not send what is left of this exchange, apart from messages."""
        for link in self._links.values():
            link.forget(self._group.tag)


@contextlib.contextmanager
def _connecting() -> Iterator[None]:
    """Turn whatever goes wrong meanwhile into a ConnectionError."""
    try:
        yield
    except TimeoutError:
        raise ConnectionError("could not be connected to in time") from None
    except Exception as error:  # noqa: BLE001 - the daemon's client raises its own kinds
        raise ConnectionError(f"could not be connected to ({error})") from None
