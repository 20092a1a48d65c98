"""Who coordinates, who is excluded and what is decided, message by message."""

from collections.abc import Sequence

import pytest

from opendiloco.averaging.agreement import Agreement, make_plan
from opendiloco.averaging.group import Group, Member, Role
from opendiloco.averaging.messages import Abort, Commit, Plan, Status, View

A, B = "a" * 64, "b" * 64
FULL, CLIENT, AUXILIARY = Role.FULL, Role.CLIENT, Role.AUXILIARY
Sent = list[tuple[int, Status | View | Plan | Commit | Abort]]


def make(*roles: Role, me: int, quorum: int = 3) -> tuple[Agreement, Sent]:
    sent: Sent = []
    members = tuple(Member(f"peer-{i}", role) for i, role in enumerate(roles))
    group = Group(b"8 bytes!", members, me=me, quorum=quorum)
    return Agreement(group, num_parts=4, send=lambda to, what: sent.append((to, what))), sent


def status(
    serial: int = 1, *, view: int = 0, have: int = 0, vote: str = "", suspects: Sequence[int] = ()
) -> Status:
    return Status(
        serial=serial, view=view, have=f"{have:x}", vote=vote, suspects=dict.fromkeys(suspects, "x")
    )


def test_the_first_reducer_that_is_not_suspected_coordinates() -> None:
    agreement, _ = make(CLIENT, FULL, FULL, FULL, me=3)

    first = agreement.coordinator
    agreement.suspect(1, "was silent")

    assert (first, agreement.coordinator) == (1, 2)


def test_a_report_goes_to_the_coordinator_alone() -> None:
    agreement, sent = make(FULL, FULL, FULL, FULL, me=2)

    agreement.report(parts=0b101, vote="")

    assert [(to, what.parts) for to, what in sent if isinstance(what, Status)] == [(0, 0b101)]
    assert len(sent) == 1


def test_equal_votes_of_all_are_a_decision_and_all_are_told() -> None:
    agreement, sent = make(FULL, FULL, FULL, FULL, me=0)
    for member in (1, 2, 3):
        agreement.hear_status(member, status(vote=A))
    agreement.report(parts=15, vote=A)

    agreement.coordinate(weigh=False)

    assert agreement.decision == Commit(digest=A)
    assert sorted(to for to, what in sent if what == Commit(digest=A)) == [1, 2, 3]


def test_nothing_is_decided_while_a_member_has_not_voted() -> None:
    agreement, _ = make(FULL, FULL, FULL, FULL, me=0)
    for member in (1, 2):
        agreement.hear_status(member, status(vote=A))
    agreement.report(parts=15, vote=A)

    agreement.coordinate(weigh=False)

    assert agreement.decision is None


def test_an_auxiliary_has_no_vote_and_is_not_waited_for() -> None:
    agreement, _ = make(FULL, AUXILIARY, FULL, FULL, me=0, quorum=2)
    for member in (2, 3):
        agreement.hear_status(member, status(vote=A))
    agreement.report(parts=15, vote=A)

    agreement.coordinate(weigh=False)

    assert agreement.decision == Commit(digest=A)


def test_two_votes_against_two_are_no_decision_but_an_end() -> None:
    agreement, _ = make(FULL, FULL, FULL, FULL, me=0)
    agreement.hear_status(1, status(vote=A))
    agreement.hear_status(2, status(vote=B))
    agreement.hear_status(3, status(vote=B))
    agreement.report(parts=15, vote=A)

    agreement.coordinate(weigh=False)

    assert isinstance(agreement.decision, Abort)


def test_a_vote_counts_for_the_quorum_after_its_member_was_lost() -> None:
    agreement, _ = make(FULL, FULL, FULL, FULL, me=0, quorum=3)
    agreement.hear_status(3, status(vote=A))
    agreement.hear_status(2, status(vote=A))
    agreement.suspect(3, "was silent")
    agreement.suspect(1, "was silent")

    agreement.report(parts=15, vote=A)
    agreement.coordinate(weigh=False)
    agreement.settled_view = agreement.view.number
    agreement.hear_status(2, status(2, view=agreement.view.number, have=15, vote=A))
    agreement.report(parts=15, vote=A)
    agreement.coordinate(weigh=False)

    assert agreement.members == {0, 2}
    assert agreement.decision == Commit(digest=A)


def test_too_few_members_left_end_the_exchange_at_once() -> None:
    agreement, _ = make(FULL, FULL, FULL, FULL, me=0, quorum=3)
    agreement.suspect(1, "was silent")
    agreement.suspect(2, "was silent")

    agreement.coordinate(weigh=False)
    agreement.settled_view = agreement.view.number
    agreement.hear_status(3, status(view=agreement.view.number))
    agreement.report(parts=0, vote="")
    agreement.coordinate(weigh=False)

    assert isinstance(agreement.decision, Abort)
    assert "2 members can agree, 3 are needed" in agreement.decision.reason
    assert "was silent" in agreement.decision.reason


def test_an_accusation_is_weighed_against_others_of_the_same_cause() -> None:
    agreement, _ = make(FULL, FULL, FULL, FULL, me=0)
    agreement.hear_status(1, status(suspects=[2]))
    agreement.hear_status(3, status(suspects=[2]))
    agreement.hear_status(2, status(suspects=[3, 1]))

    early = agreement.coordinate(weigh=False)
    agreement.coordinate(weigh=True)

    assert not early
    assert agreement.view.excluded.keys() == {2}


def test_a_view_counts_only_from_who_coordinates() -> None:
    agreement, _ = make(FULL, FULL, FULL, FULL, me=3)
    agreement.hear_view(1, View(number=2**20 + 1, excluded={0: "x"}))

    early = agreement.accept_view()
    agreement.suspect(0, "was silent")
    late = agreement.accept_view()

    assert (early, late) == (False, True)
    assert agreement.members == {1, 2, 3}


def test_whom_a_new_coordinator_forgets_to_exclude_is_suspected_again() -> None:
    agreement, _ = make(FULL, FULL, FULL, FULL, me=3)
    agreement.hear_view(0, View(number=1, excluded={2: "broke the protocol"}))
    agreement.accept_view()
    agreement.suspect(0, "was silent")
    agreement.hear_view(1, View(number=2**20 + 1, excluded={0: "x"}))

    agreement.accept_view()

    assert agreement.suspects == {2: "broke the protocol"}


def test_an_older_status_does_not_replace_a_newer_one() -> None:
    agreement, _ = make(FULL, FULL, FULL, FULL, me=0)
    agreement.hear_status(1, status(5, vote=A))

    agreement.hear_status(1, status(4))
    for member in (2, 3):
        agreement.hear_status(member, status(vote=A))
    agreement.report(parts=15, vote=A)
    agreement.coordinate(weigh=False)

    assert agreement.decision == Commit(digest=A)


@pytest.mark.parametrize(
    ("parts", "holders", "reducers"),
    [
        ({0: 0b1111, 1: 0b1111}, {}, {}),
        ({0: 0b0111, 1: 0b1111}, {3: 1}, {}),
        ({0: 0b0000, 1: 0b0000}, {}, {0: 0, 1: 1, 2: 0, 3: 1}),
        ({0: 0b0011, 1: 0b0110}, {0: 0, 2: 1}, {3: 1}),
        ({0: 0b0000, 2: 0b0001}, {0: 2}, {1: 0, 2: 0, 3: 0}),
        ({0: 0b0000, 1: 0b0001, 2: 0b0001}, {0: 1}, {1: 1, 2: 0, 3: 1}),
    ],
)
def test_a_plan_fetches_what_somebody_has_and_averages_the_rest_anew(
    parts: dict[int, int], holders: dict[int, int], reducers: dict[int, int]
) -> None:
    members = tuple(Member(f"peer-{i}", role) for i, role in enumerate([FULL, FULL, CLIENT]))
    group = Group(b"8 bytes!", members, me=0, quorum=2)

    plan = make_plan(group, 4, 9, parts)

    assert plan == Plan(view=9, holders=holders, reducers=reducers)
