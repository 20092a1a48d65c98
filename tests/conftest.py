"""What holds for every test: nothing stays behind, and the same examples every time."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import psutil
import pytest
from hypothesis import settings

pytest.register_assert_rewrite(
    "tests.support", "tests.contracts.averager_contract", "tests.contracts.bounds_contract"
)

# A loaded machine must not fail a property by being slow, nor luck by picking an example.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")

_GRACE = 5.0  # seconds that processes and threads may take to end
_POLL = 0.02
# Helpers of Python and torch that live as long as the process that shares memory, by design.
_HELPERS = ("multiprocessing.resource_tracker", "torch_shm_manager")

_Item = TypeVar("_Item")


@pytest.fixture(autouse=True)
def nothing_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a process or, without hivemind, a thread behind."""
    with_hivemind = request.node.get_closest_marker("swarm") is not None
    processes_before, threads_before = _processes(), _threads()

    yield

    processes = _left(_processes, processes_before)
    threads = set() if with_hivemind else _left(_threads, threads_before)
    names = [_describe(process) for process in processes]
    names += [f"thread {thread.name}" for thread in threads]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_GRACE)
    if names:
        pytest.fail(f"left behind: {'; '.join(sorted(names))}", pytrace=False)


def _left(look: Callable[[], set[_Item]], before: set[_Item]) -> set[_Item]:
    """Return what is new and does not end by itself within the grace."""
    deadline = time.monotonic() + _GRACE
    while (new := look() - before) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return new


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _processes() -> set[psutil.Process]:
    if not _has_children():  # a hundred times faster than looking through all processes
        return set()
    return {
        process
        for process in psutil.Process().children(recursive=True)
        if not _has_ended_or_helps(process)
    }


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _has_ended_or_helps(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
    return any(helper in command for helper in _HELPERS)


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:120]})"
    except psutil.NoSuchProcess:
        return f"process {process.pid}"
