"""The fastest kernels for matrix products, as measured: one readable JSON file an architecture.

`tools/tune_kernels.py` writes ``<arch>.json`` here, on a GPU:

    {"device": "NVIDIA H200", "date": "2026-11-21", "products": [
     {"dtype": "bf16", "n": 6144, "k": 4096, "m": 64, "tier": "skinny", "tile": "", "us": 12.3},
     ...]}

`m`, `n`, `k` are those of ``y [m, n] = x [m, k] . weight [n, k]^T``. `tile` is "" where a tier chooses for itself.
Without a measurement `gemm.plan` uses its model.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MOST_RATIO = 2.0
"""A measured number of rows serves others up to this factor larger or smaller."""

_FIELDS = {"dtype": str, "n": int, "k": int, "m": int, "tier": str, "tile": str, "us": float}


@dataclass(frozen=True, slots=True)
class Choice:
    """A tier of `gemm.TIERS`, and one of its tiles by name, or "" where it chooses for itself."""

    tier: str
    tile: str


Table = dict[tuple[str, int, int], list[tuple[int, Choice]]]
"""(dtype, n, k): the fastest for each m, ascending."""


def read(path: Path) -> Table:
    """A table's file. Raises ValueError naming the file and its fault."""
    found: Table = {}
    try:
        products = json.loads(path.read_text(encoding="utf-8"))["products"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no table of products: {error!r}") from None
    for number, each in enumerate(products):
        for name, kind in _FIELDS.items():
            if not isinstance(each.get(name), kind):
                raise ValueError(f"{path}: product {number}: {name} is {each.get(name)!r}, must be {kind.__name__}")
        rows = found.setdefault((each["dtype"], each["n"], each["k"]), [])
        rows.append((each["m"], Choice(each["tier"], each["tile"])))
    for rows in found.values():
        rows.sort(key=lambda row: row[0])
    return found


@functools.cache
def table_of(arch: str, folder: Path) -> Table:
    """The measurements on an architecture, "sm_90a"; perhaps empty. Raises as `read`."""
    path = folder / f"{arch}.json"
    return read(path) if path.exists() else {}


def choose(m: int, n: int, k: int, dtype: str, arch: str, folder: Path | None = None) -> Choice | None:
    """The fastest kernel for a product of these sizes, of m at least 1: of the measured numbers of rows with this n and
    k, the nearest. None where none is near."""
    rows = table_of(arch, folder or FOLDER).get((dtype, n, k), [])

    def ratio(row: tuple[int, Choice]) -> float:
        return max(row[0] / m, m / row[0])

    nearest = min(rows, key=ratio, default=None)
    return nearest[1] if nearest is not None and ratio(nearest) <= MOST_RATIO else None
