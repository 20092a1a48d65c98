"""Where the text comes from: CPython's own library, or local files and folders."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opendiloco.errors import ConfigError

STDLIB = "stdlib"
TEXT_SUFFIXES = (".md", ".py", ".rst", ".tex", ".text", ".txt")

CHUNK_CHARS = 1 << 18

# Tests, installed packages, and the parts that Linux distributions package apart: without
# them one Python version gives nearly the same text however it was installed.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    (
        *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
        *("dist-packages", "site-packages", "test", "tests", "__pycache__"),
    )
)


@dataclass(frozen=True, slots=True)
class TextFile:
    """One document.

    Attributes:
        path: Absolute path.
        num_bytes: Its size.
        modified_ns: Time of the last change, nanoseconds since 1970.
    """

    path: Path
    num_bytes: int
    modified_ns: int


def find_text_files(sources: Sequence[str]) -> tuple[TextFile, ...]:
    """List the documents of all sources, in an order that depends on names only.

    Args:
        sources: "stdlib" (the `*.py` of this Python's standard library), files (read as
            they are) or folders (searched for `TEXT_SUFFIXES`, without hidden entries).

    Raises:
        ConfigError: If a source is missing, unreadable or holds no text file.
    """
    if not sources:
        raise ConfigError('--data.sources: no source given; use "stdlib", a file or a folder')
    return tuple(file for source in sources for file in _files_of(source))


def read_chunks(path: Path) -> Iterator[str]:
    """Read a text file piece by piece, cutting at line ends.

    Args:
        path: UTF-8 text; invalid bytes become U+FFFD, line ends stay as they are.

    Yields:
        Pieces of `CHUNK_CHARS` characters and the rest of the line, or twice
        `CHUNK_CHARS` where a line is longer than that. Their concatenation is the text.

    Raises:
        ConfigError: If the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            while chunk := stream.read(CHUNK_CHARS):
                yield chunk + stream.readline(CHUNK_CHARS)
    except OSError as error:
        raise _unreadable(path, error) from None


def _files_of(source: str) -> list[TextFile]:
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root, _STDLIB_SKIPPED_FOLDERS) if _is_library(path)]
    else:
        root = Path(source).expanduser().absolute()
        if not root.exists():
            raise ConfigError(
                f"--data.sources: {source} does not exist; "
                'give a text file, a folder of text files or "stdlib"'
            )
        paths = _walk(root, frozenset()) if root.is_dir() else [root]
    if not paths:
        raise ConfigError(
            f"--data.sources: no text file ({' '.join(TEXT_SUFFIXES)}) in {root}; "
            "name the files themselves if theirs is another ending"
        )
    return [_describe(path) for path in paths]


def _walk(root: Path, skipped_folders: frozenset[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error)

    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [
            name for name in subfolders if name not in skipped_folders and name[0] != "."
        ]
        found += [
            Path(folder, name)
            for name in names
            if name[0] != "." and name.lower().endswith(TEXT_SUFFIXES)
        ]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _is_library(path: Path) -> bool:
    # _sysconfigdata holds the paths and flags of one build; sitecustomize is the machine's.
    return path.suffix == ".py" and not path.name.startswith(("_sysconfigdata", "sitecustomize"))


def _describe(path: Path) -> TextFile:
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    return TextFile(path=path, num_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--data.sources: cannot read {path}: {error.strerror}; give files that this user may read"
    )
