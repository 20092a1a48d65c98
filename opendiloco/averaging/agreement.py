"""How the members of an exchange agree on one average, or none: pure, no clock, no network.

One member coordinates: the first reducer that is not lost. The others tell it what they
have, whom they cannot reach, and, once they hold the whole average, its digest: their vote.
It takes out of the exchange whoever is lost (a new view), says where missing parts come from
(a plan), and decides when every member left has voted for the same average and those votes
are a quorum. Votes are never changed and a quorum is more than half, so two averages cannot
both be decided, whoever dies, freezes or takes over meanwhile.
"""

from collections import Counter
from collections.abc import Callable

from opendiloco.averaging.frames import indices_of
from opendiloco.averaging.group import Group
from opendiloco.averaging.messages import Abort, Commit, Plan, Status, View, short_reason

_VIEWS_PER_COORDINATOR = 1 << 20

Send = Callable[[int, Status | View | Plan | Commit | Abort], None]
"""Sends a message to another member."""


class Agreement:
    """One member's side of the agreement, the coordinator's included.

    Attributes:
        view: Who is out.
        plan: The latest plan; None before the first.
        settled_view: Number of the latest view in which no part is being written here any
            more; set by the caller before it reports.
        decision: How the exchange ends; None while it is open.
    """

    def __init__(self, group: Group, *, num_parts: int, send: Send) -> None:
        self._group = group
        self._num_parts = num_parts
        self._send = send
        self._suspects: dict[int, str] = {}
        self._statuses: dict[int, Status] = {}
        self._views: dict[int, View] = {}  # by sender, until it is the coordinator
        self._serial = 0
        self._planned = True  # nothing is missing a source at the beginning
        self.view = View(
            number=0, excluded=dict.fromkeys(group.senseless, "announced a senseless weight")
        )
        self.plan: Plan | None = None
        self.settled_view = 0
        self.decision: Commit | Abort | None = None

    @property
    def members(self) -> frozenset[int]:
        """Who still takes part."""
        return frozenset(range(len(self._group.members))) - self.view.excluded.keys()

    @property
    def suspects(self) -> dict[int, str]:
        """Members that this one cannot work with, and why."""
        return self._suspects

    @property
    def coordinator(self) -> int | None:
        """Who coordinates, as far as this member can see; None when nobody is left."""
        left = (self._group.reducers & self.members) - self._suspects.keys()
        return min(left, default=None)

    def suspect(self, member: int, reason: str) -> bool:
        """Take note that this member cannot work with another one.

        Returns:
            Whether that is news, so that :meth:`report` is due.
        """
        if member in self._suspects or member not in self.members:
            return False
        self._suspects[member] = short_reason(reason)
        return True

    def report(self, *, parts: int, vote: str) -> None:
        """Tell the coordinator how things stand here.

        Args:
            parts: Parts whose average this member has, as a bit set.
            vote: Digest of the whole average, empty while something is missing.
        """
        self._serial += 1
        status = Status(
            serial=self._serial,
            view=self.settled_view,
            have=f"{parts:x}",
            vote=vote,
            suspects=self._suspects,
        )
        self._statuses[self._group.me] = status
        coordinator = self.coordinator
        if coordinator is not None and coordinator != self._group.me:
            self._send(coordinator, status)

    def repeat(self, member: int) -> None:
        """Tell a member again what this one, as the coordinator, has told all."""
        if self.coordinator != self._group.me:
            return
        for message in (self.view if self.view.number else None, self.plan, self.decision):
            if message is not None:
                self._send(member, message)

    def hear_status(self, member: int, status: Status) -> None:
        """Take note of another member's situation."""
        known = self._statuses.get(member)
        if known is None or status.serial > known.serial:
            self._statuses[member] = status

    def hear_view(self, member: int, view: View) -> None:
        """Keep a view until its sender is who coordinates."""
        known = self._views.get(member)
        if known is None or view.number > known.number:
            self._views[member] = view

    def hear_plan(self, member: int, plan: Plan) -> bool:
        """Accept a plan of the coordinator's; returns whether it is new and counts."""
        if member != self.coordinator or plan.view != self.view.number:
            return False
        if self.plan is not None and self.plan.view >= plan.view:
            return False
        self.plan = plan
        return True

    def hear_decision(self, decision: Commit | Abort) -> None:
        """Accept a decision, from whomever it comes: whoever knows it may tell."""
        if self.decision is None:
            self.decision = decision

    def accept_view(self) -> bool:
        """Accept what the coordinator said last; returns whether the view has changed."""
        coordinator = self.coordinator
        view = None if coordinator is None else self._views.get(coordinator)
        if view is None or view.number <= self.view.number:
            return False
        self._enter(view)
        return True

    def coordinate(self, *, weigh: bool) -> bool:
        """Do what is due if this member coordinates.

        Args:
            weigh: Whether accusations that this member cannot confirm are old enough for
                others of the same cause to be here, so that they can be weighed.

        Returns:
            Whether there is a new view, so that :meth:`report` is due.
        """
        if self.coordinator != self._group.me or self.decision is not None:
            return False
        lost = self._lost(weigh=weigh)
        if lost:
            number = max(self.view.number, self._group.me * _VIEWS_PER_COORDINATOR) + 1
            self._enter(View(number=number, excluded={**self.view.excluded, **lost}))
            self._planned = False
            self._tell_all(self.view)
            return True
        if not self._planned:
            self._plan()
        if self._planned:
            self._decide()
        return False

    @property
    def has_accusations(self) -> bool:
        """Whether somebody cannot work with somebody else who still takes part."""
        return bool(self._accusations())

    def _enter(self, view: View) -> None:
        # A new coordinator may not know whom the old one has excluded already.
        forgotten = self.view.excluded.keys() - view.excluded.keys()
        self._suspects.update({member: self.view.excluded[member] for member in forgotten})
        self.view = view
        for member in view.excluded:
            self._suspects.pop(member, None)

    def _accusations(self) -> list[tuple[int, int, str]]:
        """Return who accuses whom of those left, and why."""
        return [
            (accuser, accused, reason)
            for accuser in sorted(self.members & self._statuses.keys())
            for accused, reason in self._statuses[accuser].suspects.items()
            if accused in self.members and accused != self._group.me
        ]

    def _lost(self, *, weigh: bool) -> dict[int, str]:
        """Return whom to exclude so that those left can all work with each other."""
        lost = dict(self._suspects)
        if not weigh:
            return lost
        while True:
            open_cases = [
                case for case in self._accusations() if not {case[0], case[1]} & lost.keys()
            ]
            if not open_cases:
                return lost
            # Whoever has trouble with most others is the likely cause; then the accused.
            involved = Counter(member for case in open_cases for member in set(case[:2]))
            accused = Counter(case[1] for case in open_cases)
            worst = max(
                involved.keys() - {self._group.me},
                key=lambda member: (involved[member], accused[member], member),
            )
            reasons = [why for _, whom, why in open_cases if whom == worst]
            lost[worst] = reasons[0] if reasons else "cannot reach others"

    def _plan(self) -> None:
        """Say where missing parts come from, once everybody has said what it has."""
        statuses = {member: self._statuses.get(member) for member in self.members}
        current = {
            member: status
            for member, status in statuses.items()
            if status is not None and status.view == self.view.number
        }
        if len(current) < len(statuses):
            return
        plan = make_plan(
            self._group,
            self._num_parts,
            self.view.number,
            {member: status.parts for member, status in current.items()},
        )
        self._planned = True
        self.plan = plan
        self._tell_all(plan)

    def _decide(self) -> None:
        votes = {member: status.vote for member, status in self._statuses.items() if status.vote}
        voters = self._group.trainers & self.members
        possible = len(voters | (votes.keys() & self._group.trainers))
        if possible < self._group.quorum:
            self._conclude(Abort(reason=self._lack(possible)))
        elif voters <= votes.keys():
            counts = Counter(votes[member] for member in votes.keys() & self._group.trainers)
            digest, count = max(counts.items(), key=lambda item: (item[1], item[0]))
            if count >= self._group.quorum:
                self._conclude(Commit(digest=digest))
            else:
                self._conclude(Abort(reason=self._lack(count)))

    def _lack(self, count: int) -> str:
        why = "; ".join(
            f"{self._group.members[member].peer_id[-6:]} {reason}"
            for member, reason in self.view.excluded.items()
        )
        return short_reason(
            f"{count} members can agree, {self._group.quorum} are needed" + (why and f" ({why})")
        )

    def _conclude(self, decision: Commit | Abort) -> None:
        self.decision = decision
        self._tell_all(decision)

    def _tell_all(self, message: View | Plan | Commit | Abort) -> None:
        for member in sorted(self.members - {self._group.me}):
            self._send(member, message)


def make_plan(group: Group, num_parts: int, view: int, parts: dict[int, int]) -> Plan:
    """Return where every part comes from that some trainer left misses.

    Args:
        group: The members.
        num_parts: Of the vector.
        view: Number of the view.
        parts: For every member left, the parts whose average it has, as a bit set.
    """
    everything = (1 << num_parts) - 1
    trainers = [member for member in sorted(parts) if member in group.trainers]
    reducers = [member for member in sorted(parts) if member in group.reducers]
    missing = 0
    for trainer in trainers:
        missing |= everything & ~parts[trainer]
    givers = sorted(parts, key=lambda member: (member not in group.reducers, member))
    plan_holders: dict[int, int] = {}
    plan_reducers: dict[int, int] = {}
    for part in indices_of(missing):
        holder = next((giver for giver in givers if parts[giver] >> part & 1), None)
        if holder is not None:
            plan_holders[part] = holder
        else:
            plan_reducers[part] = reducers[part % len(reducers)]
    return Plan(view=view, holders=plan_holders, reducers=plan_reducers)
