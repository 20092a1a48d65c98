"""Facts about where the text comes from."""

import os
from pathlib import Path

import pytest

from opendiloco.errors import ConfigError
from peers import corpus
from peers.corpus import find_text_files, read_chunks


def test_the_standard_library_comes_without_tests_and_packages() -> None:
    files = find_text_files(["stdlib"])

    parts = {part for file in files for part in file.path.parts}
    assert not parts & {"test", "tests", "site-packages", "idlelib"}
    assert Path(os.__file__) in {file.path for file in files}
    assert all(file.path.suffix == ".py" for file in files)
    assert not any("sysconfigdata" in file.path.name for file in files)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.py", "a/b/c.rst", "skip.bin", ".git/x.txt", ".y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    files = find_text_files([str(tmp_path)])

    names = [file.path.relative_to(tmp_path).as_posix() for file in files]
    assert names == ["a/b/c.rst", "a/z.md", "a.py", "b.txt"]


def test_a_named_file_is_read_whatever_its_ending(tmp_path: Path) -> None:
    path = tmp_path / "speech.bin"
    path.write_bytes(b"ab\xffcd")

    assert "".join(read_chunks(find_text_files([str(path)])[0].path)) == "ab\ufffdcd"


@pytest.mark.parametrize(
    "text",
    [
        "\u20ac" * 1000,
        "line\r\n" * 300 + "last",
        "x" * 35 + "\n" + "y" * 9,
        "",
        "a\r\rb\n\n" * 40,
    ],
)
def test_chunks_put_together_are_the_text(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(corpus, "CHUNK_CHARS", 16)

    chunks = list(read_chunks(path))

    assert "".join(chunks) == text
    assert all(len(chunk) <= 32 for chunk in chunks)


def test_chunks_end_where_lines_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("seven..\n" * 50)
    monkeypatch.setattr(corpus, "CHUNK_CHARS", 16 + 3)

    chunks = list(read_chunks(path))

    assert len(chunks) > 5
    assert all(chunk.endswith("\n") for chunk in chunks)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "no source given"),
        (["nowhere.txt"], r"nowhere\.txt does not exist"),
        (["empty"], r"no text file .*\.txt"),
    ],
)
def test_a_missing_source_is_refused_with_a_remedy(
    sources: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match=rf"--data\.sources: {message}"):
        find_text_files(sources)


def test_a_folder_given_for_reading_as_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data\.sources: cannot read .*directory"):
        list(read_chunks(tmp_path))
