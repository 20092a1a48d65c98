"""What a peer refuses before it touches the network: one line, code 2, never a traceback."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.cli import main


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Give pytest its handlers back: a peer installs its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def refusal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str, new_swarm: bool = True
) -> str:
    """Run a peer that must refuse; returns its one line."""
    founding = ["--new-swarm"] if new_swarm else []
    base = [*founding, f"--data.cache-dir={tmp_path / 'cache'}", "--network.host=127.0.0.1"]
    if not any(argument.startswith("--out-dir") for argument in arguments):
        base.append(f"--out-dir={tmp_path / 'out'}")

    code = main([*base, *arguments])

    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("opendiloco peer: error: ")
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize("peers", [[], ["--initial-peers"], ["--initial-peers", ""]])
def test_no_way_into_a_swarm_is_refused_and_new_swarm_suggested(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, peers: list[str]
) -> None:
    error = refusal(capsys, tmp_path, *peers, new_swarm=False)

    assert "--initial-peers" in error
    assert "--new-swarm" in error


@pytest.mark.parametrize(
    "address", ["hello", "/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/1/p2p/X", "/ip4/1.2.3.4 /tcp/1"]
)
def test_a_malformed_address_is_refused_with_an_example(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, address: str
) -> None:
    error = refusal(capsys, tmp_path, "--initial-peers", address, new_swarm=False)

    assert "--initial-peers" in error
    assert "/ip4/203.0.113.7/tcp/31337/p2p/Qm" in error


def test_an_unknown_option_is_refused_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "did you mean --diloco.inner-steps" in refusal(capsys, tmp_path, "--diloco.inner-step=3")


def test_an_unknown_preset_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "2m, 14m, 60m, 150m, 1b" in refusal(capsys, tmp_path, "--model.preset=3m")


def test_a_missing_text_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "/no/such/file does not exist" in refusal(
        capsys, tmp_path, "--data.sources=/no/such/file"
    )


def test_an_empty_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "empty.txt"
    text.touch()

    assert "the text is empty" in refusal(capsys, tmp_path, f"--data.sources={text}")


def test_a_text_shorter_than_one_sequence_is_refused_with_both_lengths(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("x" * 99)

    error = refusal(capsys, tmp_path, f"--data.sources={text}", "--data.seq-len=256")

    assert "has 100 tokens" in error  # the end-of-text token is one
    assert "needs 257" in error
    assert "--data.seq-len" in error


def test_an_output_folder_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "--out-dir: cannot write /proc/no" in refusal(capsys, tmp_path, "--out-dir=/proc/no")


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        error = refusal(capsys, tmp_path, f"--network.port={port}")

    assert f"--network.port: cannot listen on 127.0.0.1 port {port}" in error


@pytest.mark.parametrize("run_id", ["llama-1.1b", "a b", "", "x" * 65, "ü", "a/b"])
def test_a_run_id_with_odd_characters_is_refused_clearly(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, run_id: str
) -> None:
    assert "--run-id" in refusal(capsys, tmp_path, f"--run-id={run_id}")


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\x00\x12\x03abc"])
def test_a_garbage_identity_file_is_refused_and_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    key = tmp_path / "identity.key"
    key.write_bytes(content)

    error = refusal(capsys, tmp_path, f"--network.identity={key}")

    assert "--network.identity" in error
    assert str(key) in error
    assert key.read_bytes() == content


def test_a_device_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "--device cuda:999" in refusal(capsys, tmp_path, "--device=cuda:999")


def test_fragments_and_overlap_are_refused_rather_than_ignored(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "not yet supported" in refusal(capsys, tmp_path, "--diloco.num-fragments=2")
    assert "not yet supported" in refusal(capsys, tmp_path, "--diloco.overlap-steps=5")
