"""Rules of the house that no other tool checks."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendiloco import errors

ROOT = Path(__file__).parents[2]
PACKAGES = ("opendiloco", "peers", "bootstrap")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = [path for path in FILES if path.name != "__main__.py"]
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    too_long = [
        f"{function.name} ({lines} lines)"
        for function in functions(path)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    ]

    assert too_long == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_begins_with_one_line_that_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""

    first, *rest = docstring.split("\n")
    assert re.fullmatch(r"\S.{8,}\.", first), f"the first line is {first!r}"
    assert not rest or rest[0] == "", "the first line is the whole sentence"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_left_to_do(path: Path) -> None:
    assert re.findall(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b", path.read_text()) == []


def modules_in_tree(readme: str) -> set[str]:
    """Return the modules that the README's tree names, as paths.

    The tree is the code block with a line that begins with ``opendiloco/``. A line whose
    first word ends with a slash is a folder; what is indented under it, and the names on its
    own line, lie in it.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    trees = [block for block in blocks if re.search(r"^opendiloco/", block, re.MULTILINE)]
    assert len(trees) == 1, "the README has one code block with the tree of folders"
    found: set[str] = set()
    folders: list[tuple[int, str]] = []
    for line in trees[0].splitlines():
        words = line.split()
        indent = len(line) - len(line.lstrip())
        while words and folders and folders[-1][0] >= indent:
            folders.pop()
        if words and words[0].endswith("/"):
            folders.append((indent, words[0]))
        folder = "".join(name for _, name in folders)
        found |= {folder + name for name in re.findall(r"\b\w+\.py\b", line)}
    return {name for name in found if name.split("/")[0] in PACKAGES}


def test_the_readmes_tree_names_every_module_and_no_other() -> None:
    named = modules_in_tree((ROOT / "README.md").read_text())

    there = {name_of(path) for path in MODULES if path.name != "__init__.py"}
    assert (sorted(there - named), sorted(named - there)) == ([], [])


def test_the_tree_is_read_by_indentation() -> None:
    readme = """
```
opendiloco/      the library
  state.py       the state
  averaging/     local.py (threads) and exact.py
  progress/
    view.py
peers/           cli.py train.py
docker/          nothing.py
```
"""

    assert modules_in_tree(readme) == {
        "opendiloco/state.py",
        "opendiloco/averaging/local.py",
        "opendiloco/averaging/exact.py",
        "opendiloco/progress/view.py",
        "peers/cli.py",
        "peers/train.py",
    }


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.OpenDiLoCoError, 1),
        (errors.ConfigError, 2),
        (errors.JoinError, 3),
        (errors.FingerprintError, 3),
        (errors.SwarmLostError, 4),
        (errors.SchemaMismatchError, 1),
        (errors.StateUnavailableError, 1),
    ],
)
def test_an_error_ends_the_command_with_its_exit_code(
    error: type[errors.OpenDiLoCoError], exit_code: int
) -> None:
    assert error.exit_code == exit_code


def test_every_error_is_drawn_in_the_modules_tree_with_its_exit_code() -> None:
    drawn = {
        name: int(code) for name, code in re.findall(r"(\w+Error) +(\d)  ", errors.__doc__ or "")
    }

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert drawn == {error.__name__: error.exit_code for error in classes}
