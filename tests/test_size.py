"""How large the product may be: lines by room, and the length of functions. A capability that needs more raises its
room's number in the same commit, and says why there."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numba_kernels", "models", "runtime", "server", "tokenizer", "tools")

MOST_LINES = {
    "numba_kernels": 46_155,
    "runtime/emulator": 17_043,
    "runtime/device": 3_932,
    "runtime/tensor": 1_820,
    "runtime/backends": 3_624,
    "runtime/linear": 3_475,
    "runtime/kv": 1_949,
    "runtime/engine": 29_370,
    "runtime/text": 7_342,
    "runtime/llm": 1_983,
    "runtime/parallel": 2_876,
    "runtime/images": 937,
    "runtime/commands": 3_122,
    "runtime/bench": 12_229,
    "runtime": 3_784,
    "models": 20_634,
    "server": 23_630,
    "tokenizer": 7_628,
    "tools": 21_103,
}
"""Lines of Python and JavaScript of each room, docstrings, comments and blank lines included; "runtime" holds the files
in none of its rooms. The goal for all together is 124,800: 118,000, and 6,800 that came with files and requests.
Models with states added 6,600 on 2026-11-29, half of them kernels."""

OF_OTHERS = ROOT / "server" / "page" / "vendor"
"""markdown-it and KaTeX, minified: libraries, which NOTICE names and a test of digests holds."""

MOST_FILES = 25  # of a folder
MOST_FUNCTION_LINES, MOST_KERNEL_LINES = 150, 200

MOST_ARGUMENTS = 8  # of a device function: what belongs together is a named tuple, which compiles to the same
LONG_LISTS = {
    "attention/segments": 1,
    "gemm/adapters/tiles": 3, "gemm/rings/hopper_few": 3,
}  # fmt: skip
"""Device functions of each file that take more."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "measurements" / "README.md"]
MOST_WORDS = 39_965
"""Words of the pages for people, as `wc -w` counts them. The goal is 40,000."""


def files_of(room: str, *endings: str) -> Iterator[Path]:
    """The product's files of a room, without those that others made."""
    for ending in endings:
        yield from (path for path in sorted((ROOT / room).rglob(f"*{ending}")) if OF_OTHERS not in path.parents)


def room_of(path: Path) -> str:
    """The longest of the rooms' names that the path begins with."""
    parts = path.relative_to(ROOT).parts
    longer = "/".join(parts[:2])
    return longer if longer in MOST_LINES else parts[0]


def too_long(path: Path) -> Iterator[str]:
    """Functions of a file that have more lines than they may."""
    most = MOST_KERNEL_LINES if path.is_relative_to(ROOT / "numba_kernels") else MOST_FUNCTION_LINES
    source = path.read_bytes()
    if source.count(b"\n") <= most:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            count = node.end_lineno - node.lineno + 1
            if count > most:
                yield f"{path.relative_to(ROOT)}: {node.name} has {count} lines, may have {most}"


def test_each_room_keeps_to_its_lines() -> None:
    counts: Counter[str] = Counter()
    for package in PACKAGES:
        for path in files_of(package, ".py", ".js"):
            counts[room_of(path)] += path.read_bytes().count(b"\n")
    assert set(counts) == set(MOST_LINES)
    over = {room: (count, MOST_LINES[room]) for room, count in counts.items() if count > MOST_LINES[room]}
    assert not over, "lines, and how many there may be"


def test_folders_are_small_enough_to_know() -> None:
    counts = Counter(path.parent for package in PACKAGES for path in files_of(package, ".py", ".js"))
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_functions_are_short_enough_to_read() -> None:
    assert [line for package in PACKAGES for path in files_of(package, ".py") for line in too_long(path)] == []


def test_the_pages_keep_to_their_words() -> None:
    counts = {page.relative_to(ROOT).as_posix(): len(page.read_bytes().split()) for page in PAGES}
    assert sum(counts.values()) <= MOST_WORDS, counts


def test_device_functions_take_few_arguments() -> None:
    counts: Counter[str] = Counter()
    for path in files_of("numba_kernels/cuda", ".py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and len(node.args.args) > MOST_ARGUMENTS:
                is_device = any(ast.unparse(each) == "device_function" for each in node.decorator_list)
                counts[path.relative_to(ROOT / "numba_kernels" / "cuda").with_suffix("").as_posix()] += is_device
    over = {name: (count, LONG_LISTS.get(name, 0)) for name, count in counts.items() if count > LONG_LISTS.get(name, 0)}
    assert not over, "device functions with long lists, and how many there may be"
    assert [name for name in LONG_LISTS if not counts[name]] == [], "to be taken off the list"


@pytest.mark.parametrize(("lines", "is_long"), [(149, False), (150, True)])
def test_the_count_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, is_long: bool) -> None:
    monkeypatch.setattr("tests.test_size.ROOT", tmp_path)
    path = tmp_path / "server" / "long.py"
    path.parent.mkdir()
    path.write_text("def f():\n" + "    x = 1\n" * lines, encoding="utf-8")
    assert bool(list(too_long(path))) == is_long
