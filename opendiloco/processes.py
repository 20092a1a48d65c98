"""Child processes that never outlive their parent, and what killed ones left behind."""

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from opendiloco.units import Seconds, now

SOCKET_FOLDER_PREFIX = "opendiloco-p2pd-"
"""Private folders for p2pd's control socket are named so, in the system's temporary folder."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as the thread that forked it ends.

    Call it in a fresh child. Start children from the main thread: the kernel watches the
    thread that forked, not its process. Does nothing on systems other than Linux.

    Args:
        parent_pid: Who must still be the parent; if it died meanwhile, the child exits.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


class _Ties:
    """Remembers who forks, so that a child can tell whether its parent is still there."""

    def __init__(self) -> None:
        self._registered = False
        self._pid = os.getpid()
        self.child_name = ""

    def register(self) -> None:
        self._pid = os.getpid()
        if not self._registered:
            self._registered = True
            os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        parent_pid, self._pid = self._pid, os.getpid()
        die_with_parent(parent_pid)
        # Ctrl-C reaches the whole terminal group, but it is the parent that says goodbye; and
        # an inherited SIGTERM handler of the parent's would make the child deaf to terminate().
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.child_name and _LIBC is not None:
            _LIBC.prctl(_PR_SET_NAME, self.child_name.encode(), 0, 0, 0)


_TIES = _Ties()


def tie_children_to_this_process() -> None:
    """Make all Python children forked from now on die with their parent, even on SIGKILL.

    The children ignore SIGINT and end on SIGTERM whatever handlers the parent has. Also sets
    the start method "fork", without which hivemind does not work. May be called again.
    """
    if multiprocessing.get_start_method(allow_none=True) != "fork":
        multiprocessing.set_start_method("fork", force=True)
    _TIES.register()


@contextlib.contextmanager
def children_named(name: str) -> Iterator[None]:
    """Call the Python children that are forked meanwhile so, as `ps` and `top` show them.

    Args:
        name: At most 15 bytes; Linux cuts what is longer.
    """
    _TIES.child_name = name
    try:
        yield
    finally:
        _TIES.child_name = ""


def describe_end(exit_code: int | None) -> str:
    """Return in words how a child ended, from what `multiprocessing` or `subprocess` knows."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"{name}, as when memory runs out" if exit_code == -signal.SIGKILL else name


def how_ended(process: BaseProcess) -> str:
    """Return in words how a child has ended; empty while it runs."""
    return "" if process.is_alive() else describe_end(process.exitcode)


def stop_process(process: subprocess.Popen[bytes], grace: Seconds) -> None:
    """End a process and wait for it: SIGTERM, and SIGKILL after `grace`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def remove_stale_sockets(folder: Path, *, min_age: Seconds = Seconds(60.0)) -> int:
    """Delete what killed processes of this user left behind and nobody listens on any more.

    Args:
        folder: Where to look: hivemind's `hivemind-*.sock` and our private socket folders.
        min_age: Younger ones are left alone; somebody may be about to listen on them.

    Returns:
        How many were removed.
    """
    candidates = [*folder.glob("hivemind-*.sock"), *folder.glob(f"{SOCKET_FOLDER_PREFIX}*")]
    removed = 0
    for path in candidates:
        # What vanishes meanwhile needs no removal.
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid != os.getuid() or now() - status.st_mtime < min_age:
                continue
            if stat.S_ISSOCK(status.st_mode) and not _is_listened_on(path):
                path.unlink()
                removed += 1
            elif stat.S_ISDIR(status.st_mode) and not any(map(_is_listened_on, path.iterdir())):
                shutil.rmtree(path)
                removed += 1
    return removed


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True
