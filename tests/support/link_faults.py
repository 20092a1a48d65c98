"""Faults of the lines between peers, on an emulated WAN, and the proof that they happened."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.faults import When
from tests.support.round_handle import RoundPeer
from tests.support.swarm import wait_until
from tests.support.wan.emulation import Wan


@dataclass
class SlowLine:
    """One peer's line gets slow in one phase of its round.

    Attributes:
        wan: Where the peers are; each on the host of its number.
        mbit: Its rate from then on.
        when: In which phase.
        fired: Whether the switch has done it.
    """

    wan: Wan
    mbit: float
    when: When
    fired: bool = False

    def strike(self, victim: RoundPeer) -> None:
        """Make the line slow."""
        self.wan.set_rate(victim.member, up=self.mbit, down=self.mbit)
        self.fired = True

    def undo(self, victim: int, *, mbit: float) -> None:
        """Make it as fast as it was."""
        self.wan.set_rate(victim, up=mbit, down=mbit)


@dataclass
class Partition:
    """Two halves of the swarm cannot reach each other, from one phase of a round on.

    Attributes:
        wan: Where the peers are; each on the host of its number.
        halves: The members of the two.
        when: In which phase of the victim's round.
        fired: Whether the switch cut the lines, and packets were lost on them.
    """

    wan: Wan
    halves: tuple[Sequence[int], Sequence[int]]
    when: When
    fired: bool = False
    _num_dropped: int = 0

    def strike(self, victim: RoundPeer) -> None:
        """Cut every line between the halves."""
        assert victim.member in {*self.halves[0], *self.halves[1]}
        self._num_dropped = self._dropped()
        self._for_every_line(self.wan.cut)

    def undo(self) -> None:
        """Join the halves again."""
        wait_until(lambda: self._dropped() > self._num_dropped, "a packet is lost", within=5.0)
        self.fired = True
        self._for_every_line(self.wan.heal)

    def _for_every_line(self, do: Callable[[int, int], None]) -> None:
        for one in self.halves[0]:
            for other in self.halves[1]:
                do(one, other)

    def _dropped(self) -> int:
        return sum(traffic.num_dropped for traffic in self.wan.traffic())
