"""What children are called, and how their ends are told."""

import os
from pathlib import Path

import pytest

from opendiloco.processes import children_named, describe_end, tie_children_to_this_process


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "exit code 0"),
        (1, "exit code 1"),
        (None, "exit code None"),
        (-15, "SIGTERM"),
        (-9, "SIGKILL, as when memory runs out"),
        (-200, "signal 200"),
    ],
)
def test_an_exit_code_is_told_in_words(exit_code: int | None, words: str) -> None:
    assert describe_end(exit_code) == words


def name_of_a_fork() -> str:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, Path("/proc/self/comm").read_bytes())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        return pipe.read().decode().strip()


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="names are Linux's")
def test_children_have_the_name_only_while_it_is_given() -> None:
    tie_children_to_this_process()
    ordinary = name_of_a_fork()

    with children_named("averager"):
        named = name_of_a_fork()

    assert named == "averager"
    assert name_of_a_fork() == ordinary
