"""The demo's report: the numbers as they are, and every failure named."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from opendiloco.events import Event
from peers.demo.follow import LossPoint, PeerStory
from peers.demo.plot import draw_loss
from peers.demo.report import DemoReport, find_problems, largest_difference, make_report, summary


def finished(name: str, *, digest: str = "d", losses: tuple[float, ...] = (6.0, 3.0)) -> PeerStory:
    """Return a peer that went all the way to outer step 8."""
    left: Event = {"event": "left", "outer_step": 8, "digest": digest, "utilization": 0.5}
    return PeerStory(
        name,
        state="left",
        outer_step=8,
        num_tokens=800,
        swarm_tokens=2000,
        num_rounds=8,
        num_shared=8,
        curve=[LossPoint(step + 1, loss) for step, loss in enumerate(losses)],
        joined={"event": "joined", "from": "seed", "outer_step": 0},
        left=left,
    )


def newcomer(name: str = "peer-3") -> PeerStory:
    story = finished(name, losses=(2.0,))
    story.joined = {"event": "joined", "from": "swarm", "outer_step": 4}
    return story


def killed(name: str = "peer-2") -> PeerStory:
    story = finished(name, losses=(6.0, 5.0, 4.0, 4.0))
    story.left = None
    story.state = "killed"
    return story


def report_of(
    folder: Path,
    *survivors: PeerStory,
    victim: PeerStory | None = None,
    joiner: PeerStory | None = None,
    unigram_loss: float = 3.5,
) -> DemoReport:
    return make_report(
        survivors,
        killed=victim,
        newcomer=joiner,
        outer_steps=8,
        unigram_loss=unigram_loss,
        seconds=100.0,
        folder=folder,
    )


def save(folder: Path, **parameters: list[float]) -> Path:
    (folder / "model").mkdir(parents=True)
    arrays = {name: np.array(values, np.float32) for name, values in parameters.items()}
    save_file(arrays, folder / "model" / "model.safetensors")
    return folder


def test_the_first_loss_is_of_those_who_were_there_and_the_last_of_those_who_stayed(
    tmp_path: Path,
) -> None:
    joiner = newcomer()

    report = report_of(
        tmp_path, finished("peer-1", losses=(7.0, 3.0)), joiner, victim=killed(), joiner=joiner
    )

    assert report.loss_first == pytest.approx((7.0 + 3.0 + 6.0 + 5.0 + 4.0) / 5)
    assert report.loss_last == pytest.approx((7.0 + 3.0 + 2.0) / 3)


def test_equal_digests_are_identical_replicas(tmp_path: Path) -> None:
    report = report_of(tmp_path, finished("peer-1"), finished("peer-2"))

    assert (report.identical, report.digest) == (True, "d")


def test_one_other_digest_means_that_replicas_are_not_identical(tmp_path: Path) -> None:
    report = report_of(tmp_path, finished("peer-1"), finished("peer-2", digest="e"))

    assert (report.identical, report.digest) == (False, None)


def test_a_peer_that_never_left_makes_nothing_identical(tmp_path: Path) -> None:
    report = report_of(tmp_path, finished("peer-1"), killed("peer-2"))

    assert not report.identical


def test_a_run_as_it_should_be_has_no_problems(tmp_path: Path) -> None:
    joiner = newcomer()

    report = report_of(tmp_path, finished("peer-1"), joiner, victim=killed(), joiner=joiner)

    assert report.problems == []
    assert (report.peers, report.killed, report.joined, report.joined_at) == (
        2,
        "peer-2",
        "peer-3",
        4,
    )


def test_a_peer_that_stopped_early_is_a_problem() -> None:
    story = finished("peer-1")
    story.outer_step = 7

    problems = find_problems([story], newcomer=None, outer_steps=8)

    assert problems == ["peer-1 ended at outer step 7 of 8"]


def test_a_newcomer_that_began_at_the_seed_is_a_problem() -> None:
    story = finished("peer-3")

    problems = find_problems([story], newcomer=story, outer_steps=8)

    assert problems == ["peer-3 did not get the state of the swarm"]


def test_a_newcomer_that_averaged_with_nobody_is_a_problem_with_a_remedy() -> None:
    story = newcomer()
    story.num_shared = 0

    (problem,) = find_problems([story], newcomer=story, outer_steps=8)

    assert "too late" in problem
    assert "--outer-steps" in problem


def test_the_largest_difference_is_over_all_pairs_and_parameters(tmp_path: Path) -> None:
    folders = [
        save(tmp_path / "a", one=[1.0, 2.0], two=[0.0]),
        save(tmp_path / "b", one=[1.5, 2.0], two=[-0.25]),
        save(tmp_path / "c", one=[0.5, 2.0], two=[0.25]),
    ]

    difference = largest_difference(folders)

    assert difference == 1.0


@pytest.mark.parametrize("other", [{}, {"two": [1.0]}, {"one": [1.0, 2.0]}, {"one": [np.nan]}])
def test_models_that_cannot_be_compared_have_no_difference(
    tmp_path: Path, other: dict[str, list[float]]
) -> None:
    folders = [save(tmp_path / "a", one=[1.0]), tmp_path / "b"]
    if other:
        save(folders[1], **other)

    difference = largest_difference(folders)

    assert difference is None


def test_small_differences_are_shown_with_their_cause(tmp_path: Path) -> None:
    save(tmp_path / "peer-1", one=[1.0])
    save(tmp_path / "peer-2", one=[1.0 + 2**-15])
    report = report_of(tmp_path, finished("peer-1"), finished("peer-2", digest="e"))

    text = summary(report, picture=tmp_path / "loss.png")

    assert (
        "not identical: largest difference 3.1e-05; "
        "hivemind's all-reduce rounds each replica differently" in text
    )


def test_a_loss_above_the_baseline_is_called_so(tmp_path: Path) -> None:
    report = report_of(tmp_path, finished("peer-1"), unigram_loss=1.0)

    text = summary(report, picture=tmp_path / "loss.png")

    assert "NOT below the 1.000" in text


def test_all_rows_of_the_summary_begin_in_one_column(tmp_path: Path) -> None:
    report = report_of(tmp_path, finished("peer-1"), finished("peer-2"))

    lines = summary(report, picture=tmp_path / "loss.png").splitlines()

    assert {(line[13], line[14] != " ") for line in lines} == {(" ", True)}


def test_the_loss_curve_is_a_picture_even_when_a_peer_has_no_points(tmp_path: Path) -> None:
    joiner = newcomer()
    joiner.curve.clear()

    draw_loss(
        [finished("peer-1"), killed(), joiner],
        tmp_path / "loss.png",
        unigram_loss=3.2,
        killed=killed(),
        newcomer=joiner,
    )

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
