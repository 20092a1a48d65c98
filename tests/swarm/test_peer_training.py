"""Peers as real processes train, alone and together."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.peers import Launcher, launcher

pytestmark = pytest.mark.swarm

TOKENS_PER_ROUND = 10 * 4 * 32


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Launcher]:
    with launcher(tmp_path) as made:
        yield made


def test_a_lone_peer_learns_and_saves_what_transformers_can_load(peers: Launcher) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lone = peers.start("lone", "--new-swarm", "--diloco.outer-steps=12")

    assert lone.wait() == 0
    inner = lone.events("inner")
    assert float(str(inner[-1]["loss"])) < 0.7 * float(str(inner[0]["loss"]))
    assert [event["outcome"] for event in lone.events("round")] == ["alone"] * 12
    assert lone.events("outer_step")[-1]["num_tokens"] == 12 * TOKENS_PER_ROUND
    folder = lone.out_dir / "model"
    ids = AutoTokenizer.from_pretrained(folder)("import os", return_tensors="pt").input_ids
    logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert bool(torch.isfinite(logits).all())


def test_two_peers_average_every_round_weighted_by_their_tokens(peers: Launcher) -> None:
    together = ("--network.min-peers=2", "--diloco.outer-steps=4")
    first = peers.start("first", "--new-swarm", *together)
    second = peers.start("second", *together, "--inner.batch-size=8", joins=first)

    assert first.wait() == second.wait() == 0
    for peer in (first, second):
        rounds = peer.events("round")
        assert [event["num_peers"] for event in rounds] == [2] * 4
        weights = [int(float(str(event["total_weight"]))) for event in rounds]
        # Who starts later than the other takes fewer steps in the first span, not in the next.
        assert TOKENS_PER_ROUND < weights[0] <= 3 * TOKENS_PER_ROUND
        assert weights[1:] == [3 * TOKENS_PER_ROUND] * 3
        assert [e["verdict"] for e in peer.events("outer_step")] == ["committed"] * 4
        assert peer.events("outer_step")[-1]["num_tokens"] == sum(weights)
    ours, theirs = (load_file(peer.out_dir / "model" / "model.safetensors") for peer in peers.peers)
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    # hivemind's own all-reduce rounds every replica's average differently, in fp16.
    assert largest < 1e-3


def test_a_joiner_takes_state_position_and_rate_from_the_swarm(peers: Launcher) -> None:
    first = peers.start(
        "first", "--new-swarm", "--diloco.inner-steps=40", "--diloco.outer-steps=30"
    )
    first.wait_for("outer_step", count=3)

    joiner = peers.start(
        "joiner", "--diloco.inner-steps=40", "--diloco.outer-steps=30", joins=first
    )
    joined = joiner.wait_for("joined")
    averaged = joiner.wait_for("round")
    joiner.wait_for("inner", count=3)
    first.process.terminate()
    joiner.process.terminate()
    assert first.wait() == joiner.wait() == 0

    assert joined["from"] == "swarm"
    assert int(str(joined["outer_step"])) >= 3
    assert int(str(joined["bytes"])) > 0
    assert averaged["outer_step"] == joined["outer_step"]
    rates = {event["inner_step"]: event["lr"] for event in first.events("inner")}
    common = [e for e in joiner.events("inner") if e["inner_step"] in rates]
    assert common
    assert all(event["lr"] == rates[event["inner_step"]] for event in common)


def test_a_peer_with_other_settings_is_refused_by_the_name_of_the_setting(
    peers: Launcher,
) -> None:
    first = peers.start("first", "--new-swarm")
    first.wait_for("joined")

    other = peers.start("other", "--diloco.inner-steps=11", joins=first)

    assert other.wait() == 3
    assert len(other.stderr.strip().splitlines()) == 1
    assert "diloco.inner-steps is 10 there and 11 here" in other.stderr
