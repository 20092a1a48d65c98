"""A state put together from slices: what is equal stays, what is damaged is refused."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

import pytest
import torch
from pydantic import ValidationError

from opendiloco import state as state_module
from opendiloco.assembly import Assemblies, Assembly, DonorError, Manifest
from opendiloco.state import FragmentState, OuterState
from opendiloco.tensors import Layout
from opendiloco.units import OuterStep, Seconds

LAYOUT = Layout.of({"a": (10,)})  # three slices of the anchor and three of the momentum
A_WHILE = Seconds(5.0)

T = TypeVar("T")


def run(work: Coroutine[object, object, T]) -> T:
    """Run it in a loop of its own; asyncio.run would drop the loop that hivemind has made."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "SLICE_ELEMENTS", 4)


def some_state(outer_step: int = 3) -> OuterState:
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(10, generator=generator) for _ in range(2)]
    return OuterState(OuterStep(outer_step), 100, (FragmentState(*vectors),), ("a", "b"))


def manifest_of(state: OuterState) -> Manifest:
    return Manifest(
        outer_step=state.outer_step,
        num_tokens=state.num_tokens,
        contributors=list(state.contributors),
        slice_digests=[digest.hex() for digest in state.slice_digests],
    )


def sent(state: OuterState, indices: Sequence[int]) -> bytes:
    return b"".join(state.slices[index].numpy().tobytes() for index in indices)


def begin(offered: OuterState, base: OuterState | None = None) -> Assembly:
    return run(Assemblies(LAYOUT, base).get(manifest_of(offered)))


def receive(assembly: Assembly, content: bytes) -> None:
    async def feed() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        await assembly.receive(reader, stall=A_WHILE)

    run(feed())


def test_without_an_own_state_every_slice_is_missing_and_the_whole_is_the_donors() -> None:
    donor = some_state()
    assembly = begin(donor)
    missing = assembly.missing()

    receive(assembly, sent(donor, missing))

    assert missing == [0, 1, 2, 3, 4, 5]
    assert assembly.state.digest == donor.digest
    assert assembly.state.contributors == ("a", "b")
    assert (assembly.num_received, assembly.num_bytes) == (6, 80)


def test_only_the_slice_with_a_flipped_bit_is_missing() -> None:
    donor, own = some_state(), some_state()
    own.fragments[0].anchor.view(torch.int32)[9] ^= 1
    assembly = begin(donor, base=own)
    missing = assembly.missing()

    receive(assembly, sent(donor, missing))

    assert missing == [2]
    assert assembly.state.digest == donor.digest
    assert (assembly.num_received, assembly.num_bytes) == (1, 8)


def test_the_own_state_is_copied_not_changed() -> None:
    donor, own = some_state(), some_state()
    own.fragments[0].momentum[0] = 5.0
    before = own.fragments[0].momentum.clone()

    assembly = begin(donor, base=own)
    receive(assembly, sent(donor, assembly.missing()))
    assembly.state.fragments[0].anchor.zero_()

    assert torch.equal(own.fragments[0].momentum, before)
    assert bool(own.fragments[0].anchor.any())


def test_a_slice_that_went_bad_since_the_own_state_was_hashed_is_missing() -> None:
    donor, own = some_state(), some_state()
    assert own.digest == donor.digest  # hashed now

    own.fragments[0].anchor[5] = 7.0

    assert begin(donor, base=own).missing() == [1]


def test_a_state_that_differs_in_its_tokens_alone_needs_no_slice() -> None:
    donor = some_state()
    own = OuterState(donor.outer_step, 99, donor.fragments)

    assembly = begin(donor, base=own)

    assert assembly.missing() == []
    assert assembly.state.digest == donor.digest != own.digest


def test_a_damaged_slice_is_refused_and_those_before_it_stay() -> None:
    donor = some_state()
    assembly = begin(donor)

    with pytest.raises(DonorError, match="slice 1 is damaged"):
        receive(assembly, sent(donor, [0]) + b"x" * 64)

    assert assembly.missing() == [1, 2, 3, 4, 5]


def test_what_one_donor_gave_stays_for_the_next_with_the_same_state() -> None:
    donor = some_state()
    assemblies = Assemblies(LAYOUT, None)
    assembly = run(assemblies.get(manifest_of(donor)))

    with pytest.raises(EOFError):
        receive(assembly, sent(donor, [0, 1]))
    again = run(assemblies.get(manifest_of(donor)))
    other = run(assemblies.get(manifest_of(some_state(outer_step=4))))

    assert again.missing() == [2, 3, 4, 5]
    assert other.missing() == [0, 1, 2, 3, 4, 5]
    assert assemblies.num_bytes == 32


def test_a_state_of_another_model_is_refused() -> None:
    small = torch.zeros(3)

    with pytest.raises(DonorError, match="another model"):
        begin(OuterState(OuterStep(3), 0, (FragmentState(small, small),)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    donor = some_state()
    donor.fragments[0].momentum[2] = bad
    assembly = begin(donor)
    receive(assembly, sent(donor, assembly.missing()))

    with pytest.raises(DonorError, match="not finite"):
        assembly.check()


@pytest.mark.parametrize("contributor", ["", "two words", "line\nbreak", "x" * 129])
def test_contributors_that_cannot_be_peer_ids_are_refused(contributor: str) -> None:
    offered = manifest_of(some_state()).model_dump()

    with pytest.raises(ValidationError, match="contributors"):
        Manifest.model_validate({**offered, "contributors": [contributor]})
