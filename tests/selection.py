"""Tests that are named elsewhere than where they stand, and what `make test` leaves to `make test-all`.

Of tests that are alike but for what they cost, one stays in the default run. `pytest.mark.exhaustive` marks a test or a
`pytest.param`; `pytest.mark.exhaustive_cases(pattern, …)` marks the cases of a test, or of a file, whose names a
regular expression finds. A name or a pattern that selects no test is an error, and so is a run that was given a test's
name which its marks leave nothing of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

_LINEAR = "tests/numba_kernels/cpu/test_linear.py"
_BITS = f"{_LINEAR}::test_sums_are_those_of_the_definition_to_the_bit"
_BLOCKS = "tests/numba_kernels/cpu/test_blocks.py::test_products_rows_and_tables"
_ATTENTION = "tests/numba_kernels/cpu/test_attention.py::test_a_row_is_the_same_alone_chunked_and_in_any_batch"
_RANKS = "tests/runtime/linear/test_split_k.py::test_many_sizes"
_GOLDENS = "tests/models/test_goldens.py"
_GOLDEN = f"{_GOLDENS}::test_float32_logits_and_greedy_continuation[qwen2_odd]"
SIZES = (
    "tests/models/test_registry.py::test_loading_takes_little_more_memory_than_one_copy",
    "tests/runtime/engine/ranks/test_pipeline.py::test_each_rank_says_what_it_holds",
    "tests/runtime/engine/speculation/test_eagle3.py::test_its_pages_and_weights_are_counted",
)

TELLING: dict[str, tuple[str, ...]] = {
    "portable": (f"{_LINEAR}::test_rows_of_any_size[float16]", f"{_BITS}[9-145-33-float16]", *SIZES),
    "avx2": (f"{_BITS}[9-145-33-int8]", f"{_RANKS}[int8]", f"{_BLOCKS}[Q8_0]", _GOLDEN, *SIZES),
    "avx512": (f"{_BITS}[9-145-33-int8]", *SIZES),  # models have the tile of avx512_vnni
    "avx512_vnni": (f"{_BITS}[9-145-33-int8]", f"{_BLOCKS}[Q4_0]", f"{_BITS}[9-145-33-float32]", *SIZES),
    "avx512_bf16": (
        f"{_BITS}[9-145-33-bfloat16]", f"{_RANKS}[bfloat16]",
        f"{_GOLDENS}::test_weights_rounded_to_bfloat16_with_float32_pages[qwen2_odd]", *SIZES,
    ),
    "amx": (
        f"{_BITS}[9-145-33-bfloat16]", f"{_BITS}[35-97-129-int8]", f"{_RANKS}[bfloat16]", f"{_BLOCKS}[Q4_0]",
        f"{_ATTENTION}[80-37-1.0-bfloat16]", *SIZES,
    ),
}  # fmt: skip
"""What each layout of the cpu's runs in a process of its own, where it is not the one in force
(`tests/numba_kernels/cpu/test_tiles.py`): one test a name."""


def mark_cases(items: Sequence[pytest.Item], config: pytest.Config) -> None:
    """Marks the cases that `exhaustive_cases` names as exhaustive. Raises UsageError for a pattern of it or a line of
    `TELLING` that selects no test, in a run that collects all of its file."""
    found: dict[tuple[str, str], bool] = {}
    for item in items:
        case = item.nodeid.partition("[")[2].removesuffix("]")
        for node, mark in item.iter_markers_with_node("exhaustive_cases"):
            for pattern in mark.args:
                is_meant = re.search(pattern, case) is not None
                key = node.nodeid.partition("[")[0], pattern
                found[key] = found.get(key, False) or is_meant
                if is_meant:
                    item.add_marker(pytest.mark.exhaustive)
    unknown = (
        (name.partition("::")[0], f"{name}[{pattern}]") for (name, pattern), is_there in found.items() if not is_there
    )
    refuse_unknown(config, "exhaustive_cases", unknown)
    in_default_run = {item.nodeid for item in items if item.get_closest_marker("exhaustive") is None}
    names = {name for names in TELLING.values() for name in names}
    refuse_unknown(
        config, "tests/selection.py: TELLING (of the default run)",
        ((name.partition("::")[0], name) for name in sorted(names - in_default_run)),
    )  # fmt: skip


def refuse_unknown(config: pytest.Config, table: str, names: Iterable[tuple[str, str]]) -> None:
    """Raises UsageError for (file or folder, name) that a table has and no test answers to, where that is collected
    whole, or is not there."""
    unknown = [
        name for file, name in names if _collects(config, file) or not (config.rootpath / file).exists()
    ]  # fmt: skip
    if unknown:
        raise pytest.UsageError(f"{table}: no test answers to {', '.join(unknown)}")


def _collects(config: pytest.Config, file: str) -> bool:
    """True if a run collects all tests of a file or a folder, named from the root."""
    if config.option.deselect or config.option.ignore or config.option.ignore_glob:
        return False
    path = config.rootpath / file
    return any("::" not in arg and path.is_relative_to(_path_of(config, arg)) for arg in config.args)


def _path_of(config: pytest.Config, argument: str) -> Path:
    return (config.invocation_params.dir / argument.partition("::")[0]).resolve()


def refuse_unregistered_marks(config: pytest.Config) -> None:
    """Raises UsageError where ``-m`` has a word that is no mark: pytest would take it for one that no test has."""
    registered = {line.partition(":")[0].partition("(")[0].strip() for line in config.getini("markers")}
    expression = config.option.markexpr
    words = set(re.findall(r"[A-Za-z_]\w*", expression)) - {"and", "or", "not", "True", "False"} - registered
    if words:
        raise pytest.UsageError(f"-m {expression!r}: no mark is called {', '.join(sorted(words))}")


def refuse_empty_names(items: Sequence[pytest.Item], config: pytest.Config) -> None:
    """Raises UsageError for a test that the command line names and of which ``-m`` and ``-k`` leave nothing."""
    for argument in config.args:
        _, is_test, name = argument.partition("::")
        path = _path_of(config, argument)
        if not is_test or not path.is_relative_to(config.rootpath):
            continue
        wanted = f"{path.relative_to(config.rootpath).as_posix()}::{name}"
        if not any(item.nodeid == wanted or item.nodeid.startswith((f"{wanted}[", f"{wanted}::")) for item in items):
            chosen = f"-m {config.option.markexpr!r} -k {config.option.keyword!r}"
            raise pytest.UsageError(f"{argument} names no test that {chosen} leaves")
