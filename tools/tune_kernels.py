"""Measures the fastest kernel of each matrix product, and writes the plans' table.

    python -m tools.tune_kernels                                             # cuda:0 → numba_kernels/cuda/tables/
    python -m tools.tune_kernels --shapes 4096x4096,24576x4096 --rows 1,16,64,2048
    python -m tools.tune_kernels --device emulated:sm_90a --quick --folder /tmp/tables   # to try it; times mean nothing

Each candidate, a tier with one of its tiles, is verified against numpy on a sample of rows and only then timed, all of
them taking turns, each run with a cold second-level cache. Sizes of an earlier run are measured again; others of its
table are kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from numba_kernels.cuda import gemm  # noqa: E402
from numba_kernels.cuda.gemm import hopper  # noqa: E402
from numba_kernels.cuda.gemm.hopper_ring import Tile  # noqa: E402
from numba_kernels.cuda.tables import FOLDER, Choice, read  # noqa: E402
from runtime.bench.kernels.case import Inputs, prepare, verify  # noqa: E402
from runtime.bench.kernels.operations import product_case  # noqa: E402
from runtime.bench.kernels.timing import Stopwatch  # noqa: E402
from runtime.device.gpu import Gpu  # noqa: E402

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (8192, 8192))  # n, k
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_SHAPES, QUICK_ROWS = ((128, 64),), (1, 72)
NUM_RUNS = 15


def competitors_of(
    gpu: Gpu, m: int, n: int, k: int, dtype: str, *, more: Sequence[tuple[Tile, int]] = (), is_verified: bool = True
) -> tuple[Inputs, dict[str, Callable[[], None]], dict[str, Choice]]:
    """The arrays, which live as long as the first result; a run of each candidate, verified; and what it chooses.
    `more`: Hopper's tiles with splits of K.

    Raises AssertionError if a candidate's result is wrong.
    """
    case = product_case("auto", m, n, k, dtype)
    inputs, ready = prepare(gpu, case, m + n + k)
    product = gemm.Product(m, n, k, dtype, epilogue=gemm.Epilogue(has_residual=False, is_aligned=True))
    machine = gemm.machine_of(gpu.arch, gpu.properties.num_sms, gpu.max_clusters)
    choices = {f"{each.tier} {each.tile}".strip(): each for each in gemm.candidates(product, machine)}
    launches = {name: gemm.plan(product, machine, each.tier, each.tile) for name, each in choices.items()}
    if not hopper.why_not(product, machine):
        launches |= {f"hopper {tile}/{parts}": hopper.plan_tile(product, machine, tile, parts) for tile, parts in more}
    runs = {}
    for name, launch in launches.items():
        run = inputs.bind((launch, (*ready.operands, 0, 0, ready.out, m, n, k, 0, *gemm.NO_SQUARES)))
        if is_verified:
            verify(gpu, case, ready, run, name)
        else:
            run()
        runs[name] = run
    return inputs, runs, choices


def measure(gpu: Gpu, stopwatch: Stopwatch, m: int, n: int, k: int, dtype: str) -> dict[str, Any]:
    """The entry of one product: the fastest candidate, and the times of all. Raises AssertionError for a wrong one."""
    _inputs, competitors, choices = competitors_of(gpu, m, n, k, dtype)
    times = stopwatch.times(competitors)
    best = min(times, key=lambda name: times[name].median_us)
    return {
        "dtype": dtype, "n": n, "k": k, "m": m, "tier": choices[best].tier, "tile": choices[best].tile,
        "us": round(times[best].median_us, 3),
        "all_us": {name: round(each.median_us, 3) for name, each in times.items()},
    }  # fmt: skip


def merged(path: Path, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new entries, and an earlier table's of other sizes, by dtype, n, k and m."""
    products = {}
    if path.exists():
        read(path)  # raises for a table that plans could not read
        for each in json.loads(path.read_text(encoding="utf-8"))["products"]:
            products[each["dtype"], each["n"], each["k"], each["m"]] = each
    for each in found:
        products[each["dtype"], each["n"], each["k"], each["m"]] = each
    return [products[key] for key in sorted(products)]


def write(path: Path, device: str, found: Sequence[dict[str, Any]]) -> None:
    """The table, a product a line."""
    lines = ",\n".join(f" {json.dumps(each)}" for each in merged(path, found))
    head = json.dumps({"device": device, "date": date.today().isoformat()})[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head}, "products": [\n{lines}\n]}}\n', encoding="utf-8")
    read(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or emulated:sm_90a to try the tool")
    parser.add_argument("--quick", action="store_true", help="one tiny shape")
    parser.add_argument("--shapes", type=_shapes, help="NxK, comma-separated; default: Qwen3-8B's and 8192x8192")
    parser.add_argument("--rows", type=_rows, help="numbers of rows, comma-separated")
    parser.add_argument("--dtype", choices=("f16", "bf16", "f32"), default="bf16")
    parser.add_argument("--folder", type=Path, help="where the table goes; default: among the kernels")
    asked = parser.parse_args(arguments)
    gpu = Gpu.of(asked.device)
    if gpu.driver.is_emulated and asked.folder is None:
        parser.error(f"{asked.device} is emulated: its times mean nothing and go to no plan; name another --folder")
    shapes = asked.shapes or (QUICK_SHAPES if asked.quick else SHAPES)
    rows = asked.rows or (QUICK_ROWS if asked.quick else ROWS)
    stopwatch = Stopwatch(gpu, 2 if asked.quick else NUM_RUNS)
    path = (asked.folder or FOLDER) / f"{gpu.arch}.json"
    found = []
    for n, k in shapes:
        for m in rows:
            found.append(measure(gpu, stopwatch, m, n, k, asked.dtype))
            best = found[-1]
            times = ", ".join(f"{name} {us:,.1f}" for name, us in best["all_us"].items())
            print(f"{m} x {n} x {k}: {best['tier']} {best['tile']} of {times} us", flush=True)
            write(path, gpu.properties.name, found)
            gc.collect()
    return 0


def _rows(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return found


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for part in text.split(","):
        n, k = _rows(part.replace("x", ","))
        found.append((n, k))
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
