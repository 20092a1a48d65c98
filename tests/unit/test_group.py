"""Groups and how they divide a vector."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.averaging.group import Group, Member, Parts, Role


def group(*roles: Role, me: int = 0, weights: dict[int, float] | None = None) -> Group:
    members = tuple(
        Member(f"peer-{i}", role, weight=(weights or {}).get(i, 1.0))
        for i, role in enumerate(roles)
    )
    return Group(b"8 bytes!", members, me=me, quorum=1)


@given(
    num_elements=st.integers(1, 10**7), num_reducers=st.integers(1, 64), block=st.integers(1, 5000)
)
def test_parts_cover_every_element_once_and_begin_at_blocks(
    num_elements: int, num_reducers: int, block: int
) -> None:
    parts = Parts.of(num_elements, num_reducers=num_reducers, block_elements=block)

    bounds = [parts.bounds(part) for part in range(len(parts))]

    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_elements
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    assert all(begin % block == 0 for begin, _ in bounds)


@given(num_elements=st.integers(10**6, 10**8), num_reducers=st.integers(1, 16))
def test_reducers_get_equal_shares_of_a_large_vector(num_elements: int, num_reducers: int) -> None:
    parts = Parts.of(num_elements, num_reducers=num_reducers, block_elements=1)

    whose = parts.reducers(frozenset(range(num_reducers)))

    shares = [whose.count(reducer) for reducer in range(num_reducers)]
    assert max(shares) - min(shares) <= 1
    assert min(shares) >= math.floor(len(parts) / num_reducers)


def test_only_two_clients_have_no_link() -> None:
    this = group(Role.FULL, Role.CLIENT, Role.CLIENT, Role.AUXILIARY)

    assert not this.are_linked(1, 2)
    assert this.are_linked(0, 1)
    assert this.are_linked(1, 3)
    assert not this.are_linked(0, 0)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 1e30])
def test_a_weight_that_cannot_be_used_makes_its_member_senseless(weight: float) -> None:
    this = group(Role.FULL, Role.FULL, weights={1: weight})

    assert this.senseless == {1}


def test_an_auxiliary_needs_no_weight() -> None:
    this = group(Role.FULL, Role.AUXILIARY, weights={1: 0.0})

    assert this.senseless == frozenset()
    assert this.trainers == {0}
    assert this.reducers == {0, 1}


def test_the_same_peer_twice_is_no_group() -> None:
    with pytest.raises(ValueError, match="twice"):
        Group(b"8 bytes!", (Member("a", Role.FULL), Member("a", Role.FULL)), me=0, quorum=1)
