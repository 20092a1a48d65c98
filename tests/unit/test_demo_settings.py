"""What the demo can be told, and what it refuses in one line."""

from pathlib import Path

import pytest

from opendiloco.settings import load_settings
from peers.config import PeerConfig
from peers.demo.cli import main
from peers.demo.settings import DemoConfig, peer_arguments

ADDRESS = "/ip4/127.0.0.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def load(*argv: str) -> DemoConfig:
    return load_settings(DemoConfig, argv, prog="demo", environ={})


def test_what_a_peer_is_told_is_what_a_peer_understands(tmp_path: Path) -> None:
    config = load("--outer-steps", "8", "--inner-steps", "5", "--seed", "7")

    module, *arguments = peer_arguments(
        config, tmp_path / "peer-2", address=ADDRESS, cache_dir=tmp_path / "cache", min_peers=3
    )
    peer = load_settings(PeerConfig, arguments, prog="peer", environ={})

    assert module == "peers"
    assert (peer.name, peer.seed, peer.network.min_peers) == ("peer-2", 7, 3)
    assert (peer.diloco.outer_steps, peer.diloco.inner_steps) == (8, 5)
    assert peer.initial_peers == [ADDRESS]


@pytest.mark.parametrize(("outer_steps", "kill_after"), [(4, 1), (5, 1), (6, 2), (12, 5)])
def test_a_peer_is_killed_just_before_the_middle(outer_steps: int, kill_after: int) -> None:
    config = load("--outer-steps", str(outer_steps))

    assert config.kill_after == kill_after


@pytest.mark.parametrize("argv", [["--peers", "1"], ["--no-kill"]])
def test_nobody_is_killed_when_alone_or_when_asked_not_to(argv: list[str]) -> None:
    config = load(*argv, "--outer-steps", "1")

    assert not config.replaces_a_peer


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--outer-steps", "3"], "--outer-steps: 3 leave no time to replace a peer"),
        (["--peers", "17"], "--peers: "),
        (["--inner-steps", "0"], "--inner-steps: "),
        (["--peer", "2"], "no such option --peer; did you mean --peers?"),
    ],
)
def test_a_wrong_setting_is_refused_with_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(argv)

    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith(f"opendiloco demo: error: {says}")


@pytest.mark.parametrize("where", ["events.jsonl", "peer-1/events.jsonl"])
def test_a_folder_with_events_of_another_demo_is_refused_with_one_line(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).touch()

    code = main(["--out-dir", str(tmp_path)])

    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert "holds the events of another run; choose another folder" in line


def test_an_out_dir_that_is_a_file_is_refused_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    code = main(["--out-dir", str(tmp_path / "file")])

    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith("opendiloco demo: error: --out-dir: cannot use")
