"""What the code takes for granted of hivemind 1.1.12: an upgrade that changes it fails here."""

import inspect
import signal
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking, PotentialLeaders

from opendiloco.averaging.protocol import RoundOutcome, RoundRequest
from opendiloco.units import OuterStep, Seconds
from tests.support.swarm import nodes

pytestmark = pytest.mark.swarm


def test_the_version_is_the_one_whose_internals_are_used() -> None:
    assert version("hivemind") == "1.1.12"


def test_hivemind_makes_a_process_that_starts_an_averager_deaf_to_ctrl_c() -> None:
    assert "SIGINT, signal.SIG_IGN" in inspect.getsource(DecentralizedAverager.run_in_background)


def test_an_averager_of_ours_leaves_ctrl_c_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    with nodes(1, tmp_path, fragment_sizes=[10]):
        after = signal.getsignal(signal.SIGINT)

    assert after is before
    assert after is not signal.SIG_IGN


def test_a_group_of_the_expected_size_starts_long_before_patience_ends(tmp_path: Path) -> None:
    patience = 30.0

    with nodes(2, tmp_path, fragment_sizes=[10], patience=patience) as made:
        began_at = time.monotonic()
        futures = []
        for node in made:
            assert node.averager is not None
            node.tracker.update(state="averaging", outer_step=0)
            request = RoundRequest(
                OuterStep(0), 0, lambda out: out.fill_(1.0), 1.0, 1, Seconds(60.0)
            )
            futures.append(node.averager.begin(request))
        ended = [future.result(timeout=60.0) for future in futures]
        seconds = time.monotonic() - began_at

    assert [result.outcome for result in ended] == [RoundOutcome.AVERAGED] * 2
    assert seconds < patience / 2


def test_the_attributes_that_address_a_round_exist() -> None:
    names = inspect.getsource(Matchmaking.__init__)

    assert "self.target_group_size" in names
    assert "self.potential_leaders" in names
    assert "self.group_key_manager" in names
    assert "self.target_group_size" in inspect.getsource(PotentialLeaders.__init__)
    assert "self.group_bits" in inspect.getsource(GroupKeyManager.__init__)
    assert inspect.iscoroutinefunction(Matchmaking.look_for_group)
    assert inspect.iscoroutinefunction(DecentralizedAverager._shutdown)
