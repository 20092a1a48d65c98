"""The demo's processes: their output is kept, and none of them is left behind."""

import signal
import time
from pathlib import Path

import pytest

from opendiloco.units import Seconds
from peers.demo.children import Child, ChildEndedError, Children, children


def run(started: Children, folder: Path, code: str) -> Child:
    """Start a process that runs the code."""
    return started.start("it", folder, ["timeit", "-n1", "-r1", code], num_threads=1)


def wait_for(child: Child, text: str) -> None:
    deadline = time.monotonic() + 10.0
    while text not in child.log:
        assert time.monotonic() < deadline, child.log
        time.sleep(0.01)


def test_no_process_is_left_when_the_body_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), children(Seconds(5.0)) as started:  # noqa: PT012
        child = run(started, tmp_path, "import time; time.sleep(60)")
        raise ZeroDivisionError

    assert child.process.returncode == -signal.SIGTERM


def test_a_process_that_is_deaf_to_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('deaf', flush=True); time.sleep(60)"
    )

    with children(Seconds(0.1)) as started:
        child = run(started, tmp_path, code)
        wait_for(child, "deaf")

    assert child.process.returncode == -signal.SIGKILL


def test_sigterm_interrupts_the_body_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), children(Seconds(5.0)):
        signal.raise_signal(signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_failed_is_named_with_its_code_and_last_lines(tmp_path: Path) -> None:
    with children(Seconds(5.0)) as started:
        child = run(started, tmp_path, "print('the reason', flush=True); import os; os._exit(3)")
        child.process.wait(10.0)

        with pytest.raises(ChildEndedError, match="it ended with exit code 3") as caught:
            child.refuse_end(codes=(0,))

    assert caught.value.log_tail == "the reason"


def test_a_process_that_ended_well_is_not_refused(tmp_path: Path) -> None:
    with children(Seconds(5.0)) as started:
        child = run(started, tmp_path, "pass")
        child.process.wait(10.0)

        child.refuse_end(codes=(0,))

    assert child.process.returncode == 0


def test_settings_in_the_environment_do_not_reach_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENDILOCO_RUN_ID", "other")

    with children(Seconds(5.0)) as started:
        child = run(started, tmp_path, "import os; print(sorted(os.environ), flush=True)")
        child.process.wait(10.0)

    assert "OMP_NUM_THREADS" in child.log
    assert "OPENDILOCO" not in child.log
