"""Counts our kernels beside Triton's for the same work: what each asks of memory, and what its machine code executes.

    python tools/compare_triton.py [--arch ARCH] [--only TEXT] [--nvdisasm PROGRAM] [--check]
                                   [--json FILE] [--markdown FILE]

Both run on the same emulated GPU, on the same numbers, and each result is compared with numpy's before anything is
counted. Both are assembled by the same ptxas (nvJitLink); nvdisasm shows their main loops. Triton's PTX lies in
tools/triton_peers/ (tools/make_triton_peers.py made it): Triton itself is not needed. A kernel of ours stands beside
the tutorial's configuration whose tile is nearest to its own. With `--check` the exit status is 1 where ours is worse
in any count.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from numba_kernels.cuda import attention, gemm  # noqa: E402
from numba_kernels.cuda.attention import hopper_tiles  # noqa: E402
from numba_kernels.cuda.gemm import hopper, hopper_ring  # noqa: E402
from numba_kernels.cuda.specialisation import Launch, Specialisation, TensorMapLayout  # noqa: E402
from runtime.bench.kernels.counted import Counts  # noqa: E402
from runtime.device.assemble import assemble  # noqa: E402
from tools.kernel_counts import Bench  # noqa: E402
from tools.kernel_plots import table  # noqa: E402
from tools.machine_code import NoDisassemblerError, disassemble, find_nvdisasm, main_loop  # noqa: E402

PEERS = ROOT / "tools" / "triton_peers"
ARCHS = ("sm_80", "sm_90a")
MATMULS = ((256, 256, 512), (512, 512, 256), (128, 1024, 1024), (1024, 128, 512))
ATTENTIONS = ((2, 512, 128),)  # heads, queries and keys, head dim
BF16 = np.dtype(ml_dtypes.bfloat16)
ATTENTION_TOLERANCE = 2e-2
_OPERATION_FLOPS = 2 * 16 * 8 * 16
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}  # Triton's code of a tensor map's swizzle: bytes


@dataclass(frozen=True, slots=True)
class Measured:
    """What one kernel did for one piece of work.

    Attributes:
        name: of our tier, or "triton".
        tile: a block's tile: rows x columns x depth, or queries x keys.
        bytes, sectors: of device memory: those asked for, and the 32-byte sectors that they touch; without tables.
        table_sectors: those read by single 32-bit integers a lane, of block tables and lengths.
        conflicts: turns of shared memory's banks beyond the fewest.
        barriers: warp instructions that wait at barriers.
        ptx_per_operation: warp instructions of the whole kernel as PTX for each product of 16 x 8 x 16.
        machine_per_operation: machine instructions of the main loop for each product of 16 x 8 x 16.
        mix: of the main loop's machine instructions, by opcode.
        num_registers, spill_bytes: of a thread.
    """

    name: str
    tile: str
    bytes: int
    sectors: int
    table_sectors: int
    conflicts: int
    barriers: int
    ptx_per_operation: float
    machine_per_operation: float
    mix: dict[str, int]
    num_registers: int
    spill_bytes: int


METRICS = {
    "bytes": "bytes", "sectors": "sectors", "conflicts": "bank conflicts", "barriers": "barriers",
    "machine_per_operation": "machine instructions / operation",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One piece of work on one architecture: ours, the configuration of Triton's that stands beside it, and all."""

    work: str
    arch: str
    shape: str
    ours: Measured
    triton: Measured
    configurations: tuple[Measured, ...]

    @property
    def worse(self) -> list[str]:
        """The counts in which ours is worse; one that is not a number counts as worse."""
        return [name for name in METRICS if not getattr(self.ours, name) <= getattr(self.triton, name)]


# What does the work: our tiers, one line each

Run = Callable[[Bench, Any], tuple[Specialisation, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Tier:
    """One of our kernels. `run(bench, work)` launches it and returns what it launched, and a block's tile.

    `least_rows`: of a product; no plan takes the kernel for fewer, which leave blocks of a cluster empty.
    """

    name: str
    archs: tuple[str, ...]
    run: Run
    least_rows: int = 1


@dataclass(frozen=True, slots=True)
class Product:
    """y [m, n] = x [m, k] weight [n, k]^T, bf16, with the arrays' addresses."""

    m: int
    n: int
    k: int
    x: int
    weight: int
    y: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Causal attention of `heads` heads, each with its own keys, over `length` tokens, bf16; with the addresses.

    q, k, v, out are [heads, length, head_dim] for Triton, [length, heads, head_dim] and pages for ours.
    """

    heads: int
    length: int
    head_dim: int
    q: int
    k: int
    v: int
    out: int
    block_tables: int = 0


def _tensor_core(bench: Bench, work: Product) -> tuple[Specialisation, tuple[int, ...]]:
    """The tile that large products take: the shapes here are small only to be emulated."""
    product = gemm.Product(work.m, work.n, work.k, "bf16")
    launch = gemm.plan(product, gemm.machine_of(num_multiprocessors=1), "tensor_core")
    assert launch is not None
    bench.launch(launch, work.x, work.weight, 0, 0, work.y, work.m, work.n, work.k, 0)
    tile = str(launch.specialisation.constants["tile"]).split("_")[0]  # "128x128x32_s5"
    return launch.specialisation, tuple(map(int, tile.split("x")))


def _hopper(tile: hopper_ring.Tile, bench: Bench, work: Product) -> tuple[Specialisation, tuple[int, ...]]:
    epilogue = gemm.Epilogue(has_residual=False, is_aligned=True)
    product = gemm.Product(work.m, work.n, work.k, "bf16", epilogue=epilogue)
    launch = hopper.plan_tile(product, gemm.machine_of(hopper.ARCH), tile)
    bench.launch(launch, work.x, work.weight, 0, 0, work.y, work.m, work.n, work.k, 0)
    return launch.specialisation, (tile.block_m, tile.block_n, hopper_ring.BLOCK_K)


def _flash(tier: str, bench: Bench, work: Prefill) -> tuple[Specialisation, tuple[int, ...]]:
    pages = -(-work.length // PAGE)
    plan = attention.plan(
        num_tokens=work.length, num_seqs=1, max_query_len=work.length, max_seq_len=work.length,
        num_q_heads=work.heads, num_kv_heads=work.heads, head_dim=work.head_dim, table_width=pages,
        dtype="bf16", block_size=PAGE, num_sms=132, tier=tier, arch=bench.gpu.arch, num_blocks=pages,
    )  # fmt: skip
    starts = bench.put(np.array([0, work.length], np.int32))
    lengths = bench.put(np.array([work.length], np.int32))
    arguments = (work.q, work.k, work.v, work.out, 0, starts, lengths, work.block_tables, work.head_dim**-0.5)
    bench.launch(plan.attend, *plan.attend_arguments(*arguments))
    if tier == "flash_hopper":
        return plan.attend.specialisation, (hopper_tiles.NUM_ROWS, hopper_tiles.hopper_tiles(work.head_dim).num_keys)
    kernel = plan.attend.specialisation
    return kernel, (kernel.constants["num_rows"], kernel.constants["num_keys"])


PAGE = 16
GEMMS = [
    Tier("tensor_core", ("sm_80",), _tensor_core),
    *(
        Tier("hopper", ("sm_90a",), functools.partial(_hopper, tile), tile.block_m * tile.cluster)
        for tile in hopper.TILES
    ),
]
PREFILLS = [
    Tier("flash", ("sm_80",), functools.partial(_flash, "flash")),
    Tier("flash_hopper", ("sm_90a",), functools.partial(_flash, "flash_hopper")),
]


# Triton's side


def peers(work: str, arch: str) -> dict[str, dict[str, Any]]:
    """The recorded kernels for a kind of work ("matmul", "attention") on an architecture, by name."""
    index = json.loads((PEERS / "peers.json").read_text())
    return {name: facts for name, facts in index.items() if (facts["work"], facts["arch"]) == (work, arch)}


def text_of(name: str) -> str:
    return (PEERS / f"{name}.ptx").read_text()


def tile_of(facts: dict[str, Any]) -> tuple[int, ...]:
    """A recorded kernel's tile."""
    return tuple(facts["numbers"][name] for name in ("BM", "BN", "BK") if name in facts["numbers"])


def _launch_peer(bench: Bench, name: str, facts: dict[str, Any], grid: tuple[int, int], arguments: list[Any]) -> None:
    scratch = facts["scratch_bytes"] * grid[0] * grid[1]
    arguments = [*arguments, bench.empty(scratch) if scratch else 0, 0]
    launch = Launch(None, (*grid, 1), (facts["threads"], 1, 1), facts["shared_bytes"])  # type: ignore[arg-type]
    bench.launch_text(text_of(name), facts["kernel"], launch, arguments)


def _peer_matmul(name: str, facts: dict[str, Any], bench: Bench, work: Product) -> None:
    rows, columns, _ = tile_of(facts)
    grid = -(-work.m // rows) * -(-work.n // columns), 1
    arguments = [work.x, work.weight, work.y, work.m, work.n, work.k, work.k, work.k, work.n]
    _launch_peer(bench, name, facts, grid, arguments)


def _peer_attention(name: str, facts: dict[str, Any], bench: Bench, work: Prefill) -> None:
    rows, _ = tile_of(facts)
    height = work.heads * work.length
    tensors: list[Any] = []
    for index, address in enumerate((work.q, work.k, work.v, work.out)):
        if not facts["maps"]:
            tensors.append(address)
            continue
        known = facts["maps"][index]
        box, swizzle = tuple(reversed(known["box"])), _SWIZZLES[known["swizzle"]]
        layout = TensorMapLayout("bf16", (work.head_dim, height), (2 * work.head_dim,), box, swizzle)
        tensors += [bench.gpu.tensor_map(address, layout), height, work.head_dim, work.head_dim, 1]
    logsumexp = bench.empty(4 * height)
    arguments = [float(work.head_dim**-0.5), logsumexp, *tensors, work.heads, work.length]
    _launch_peer(bench, name, facts, (work.length // rows, work.heads), arguments)


def nearest(tile: Sequence[int], known: dict[str, dict[str, Any]], spill_bytes: Mapping[str, int]) -> str:
    """The recorded kernel whose tile is nearest: by the ratios of its sizes, then by those of its depth; of equal ones
    that which spills less, as a tuner would find."""

    def distance(name: str) -> tuple[float, float, int]:
        ratios = [abs(math.log2(a / b)) for a, b in zip(tile, tile_of(known[name]))]
        return sum(ratios[:2]), sum(ratios), spill_bytes[name]

    return min(known, key=distance)


# Counting


class Comparer:
    """Runs both sides on one architecture. Every result is verified before it is counted."""

    def __init__(self, arch: str, nvdisasm: str) -> None:
        self.arch = arch
        self.nvdisasm = nvdisasm
        self.bench = Bench(arch)
        self._machine: dict[str, tuple[Any, Any]] = {}

    def _code(self, name: str, text: str) -> tuple[Any, Any]:
        if name not in self._machine:
            made = assemble(text, self.arch)
            self._machine[name] = made, main_loop(disassemble(made.cubin, self.nvdisasm))
        return self._machine[name]

    def measured(self, name: str, tile: str, key: str, text: str, counts: Counts) -> Measured:
        """A kernel's counts with those of its machine code; `key` names the text."""
        made, loop = self._code(key, text)
        operations = counts.tensor_flops / _OPERATION_FLOPS
        return Measured(
            name, tile, counts.global_bytes - counts.word_bytes, counts.sectors - counts.word_sectors,
            counts.word_sectors, counts.conflicts, counts.barriers,
            round(counts.warp_instructions / operations, 3), round(loop.instructions_per_operation, 3), loop.mix,
            made.num_registers, made.spill_store_bytes + made.spill_load_bytes,
        )  # fmt: skip

    def product(self, m: int, n: int, k: int, tiers: Sequence[Tier] = GEMMS) -> Iterator[Row]:
        """A row for each of our tiers that this architecture has. Raises AssertionError for a wrong result."""
        random = np.random.default_rng(m + n + k)
        x, weight = (random.integers(-2, 3, (rows, k)).astype(BF16) for rows in (m, n))
        expected = (x.astype(np.float32) @ weight.astype(np.float32).T).astype(BF16)
        bench = self.bench

        def run(side: Callable[[Bench, Product], Any]) -> tuple[Counts, Any]:
            found, launched = np.empty((m, n), BF16), []

            def once(bench: Bench) -> None:
                work = Product(m, n, k, bench.put(x), bench.put(weight), bench.put(np.full((m, n), np.nan, BF16)))
                launched.append(side(bench, work))
                bench.gpu.read(work.y, found)

            counts = bench.count("matmul", once)
            if not np.array_equal(found.astype(np.float32), expected.astype(np.float32)):
                raise AssertionError(f"{side} on {self.arch}: the product {m} x {n} x {k} is wrong")
            return counts, launched[0]

        fitting = [tier for tier in tiers if tier.least_rows <= m]
        yield from self._rows("matmul", f"{m} x {n} x {k}", run, fitting, _peer_matmul)

    def prefill(self, heads: int, length: int, head_dim: int, tiers: Sequence[Tier] = PREFILLS) -> Iterator[Row]:
        """A row for each of our tiers that this architecture has. Raises AssertionError for a wrong result."""
        random = np.random.default_rng(head_dim)
        q, k, v = (random.standard_normal((heads, length, head_dim), np.float32).astype(BF16) for _ in range(3))
        wide = [each.astype(np.float64) for each in (q, k, v)]
        scores = wide[0] @ wide[1].transpose(0, 2, 1) * head_dim**-0.5
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ wide[2]
        blocks = -(-length // PAGE)
        order = random.permutation(blocks).astype(np.int32)

        def pages(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            cut = rows.reshape(heads, blocks, PAGE, head_dim).transpose(1, 0, 2, 3)
            made = np.empty_like(cut, order="C")
            made[order] = cut
            return made

        def run(side: Callable[[Bench, Prefill], Any], *, is_paged: bool = True) -> tuple[Counts, Any]:
            found, launched = np.empty(q.shape if not is_paged else (length, heads, head_dim), BF16), []

            def once(bench: Bench) -> None:
                arrays = (q.transpose(1, 0, 2), pages(k), pages(v)) if is_paged else (q, k, v)
                q_at, k_at, v_at = (bench.put(np.ascontiguousarray(array)) for array in arrays)
                out = bench.put(np.full(found.shape, np.nan, BF16))
                work = Prefill(heads, length, head_dim, q_at, k_at, v_at, out, bench.put(order))
                launched.append(side(bench, work))
                bench.gpu.read(out, found)

            counts = self.bench.count("attention", once)
            actual = found.transpose(1, 0, 2) if is_paged else found
            if not np.abs(actual.astype(np.float64) - expected).max() <= ATTENTION_TOLERANCE:
                raise AssertionError(f"{side} on {self.arch}: attention {heads} x {length} x {head_dim} is wrong")
            return counts, launched[0]

        shape = f"{heads} heads, {length} tokens, head dim {head_dim}"
        yield from self._rows(
            "attention", shape, run, tiers, _peer_attention,
            lambda facts: facts["numbers"]["HEAD"] == head_dim, functools.partial(run, is_paged=False),
        )  # fmt: skip

    def _rows(
        self, work: str, shape: str, run: Callable[..., tuple[Counts, Any]], tiers: Sequence[Tier],
        launch_peer: Callable[..., None], is_meant: Callable[[dict[str, Any]], bool] = lambda facts: True,
        run_peer: Callable[..., tuple[Counts, Any]] | None = None,
    ) -> Iterator[Row]:  # fmt: skip
        known = {name: facts for name, facts in peers(work, self.arch).items() if is_meant(facts)}
        theirs = {}
        for name, facts in known.items():
            counts, _ = (run_peer or run)(functools.partial(launch_peer, name, facts))
            tile = f"{'x'.join(map(str, tile_of(facts)))}, {facts['stages']} stages, {facts['warps']} warps"
            theirs[name] = self.measured("triton", tile, name, text_of(name), counts)
        spills = {name: each.spill_bytes for name, each in theirs.items()}
        for tier in tiers:
            if self.arch in tier.archs:
                counts, (specialisation, tile) = run(tier.run)
                text = self.bench.ptx_of(specialisation)
                ours = self.measured(tier.name, "x".join(map(str, tile)), specialisation.name, text, counts)
                yield Row(work, self.arch, shape, ours, theirs[nearest(tile, known, spills)], tuple(theirs.values()))


def compare(archs: Sequence[str], nvdisasm: str, text: str = "") -> list[Row]:
    """All rows whose work, architecture or shape contains `text`."""
    rows: list[Row] = []
    for arch in archs:
        comparer = Comparer(arch, nvdisasm)
        for m, n, k in MATMULS:
            if text in f"matmul {arch} {m} x {n} x {k}":
                rows += comparer.product(m, n, k)
        for heads, length, head_dim in ATTENTIONS:
            if text in f"attention {arch} {heads} x {length} x {head_dim}":
                rows += comparer.prefill(heads, length, head_dim)
    return rows


# The page

NOTES = """
Its kernels do what the tutorials 03 (matrix multiplication) and 06 (fused attention, forward, causal) do, in those of
the configurations that the tutorials' tuners try whose tiles are ours. Both sides run on the same emulated GPU on the
same numbers, each result is verified, and both are assembled by the same ptxas. Ours stands beside the configuration
with the nearest tile; the mix of their instructions is in [triton_comparison.json](triton_comparison.json). In each
cell: ours / Triton's.

*Bytes* are those that lanes and TMA copies ask of device memory, *sectors* the 32-byte pieces that they touch. *Bank
conflicts* are turns of shared memory beyond the fewest (what TMA writes and wgmma reads there is not modelled, on
either side). *Barriers* are warp instructions at which a warp waits for others or for TMA: barriers of the block or the
cluster, mbarriers; arrivals, which do not wait, are left out. *Machine instructions / operation* are those of the main
loop, as nvdisasm shows it, for each product of 16 x 8 x 16 that a warp's tensor-core instructions do in it (a wgmma of
64 x N x 16 is N / 8 of them). Where a kernel has several such loops (one masks, say), it is the leanest, on both sides,
and of a loop its leanest turn: what a branch skips that skips no tensor-core work is not in it.
Ours reads its keys from shuffled pages by a block table, Triton's from rows: what ours reads of tables and lengths is
in a column of its own."""

def as_json(rows: Sequence[Row]) -> str:
    """Everything counted."""
    compilers = {facts["compiler"] for arch in ARCHS for facts in peers("matmul", arch).values()}
    found, configurations = [], {}
    for row in rows:
        known = asdict(row)
        configurations[f"{row.work} {row.arch} {row.shape}"] = known.pop("configurations")
        found.append(known | {"worse": row.worse})
    report = {"compilers": sorted(compilers), "rows": found, "triton_configurations": configurations}
    return json.dumps(report, indent=1) + "\n"


def as_markdown(rows: Sequence[Row]) -> str:
    """The page."""
    worse = [row for row in rows if row.worse]
    compilers = sorted({facts["compiler"] for arch in ARCHS for facts in peers("matmul", arch).values()})
    parts = [
        "# Counted beside Triton", "",
        "Written by `python tools/compare_triton.py --markdown docs/triton_comparison.md --json "
        "docs/triton_comparison.json`. No number here was measured on a GPU.", "",
        f"Triton's compiler: {', '.join(compilers)}.", NOTES, "",
    ]  # fmt: skip
    for work, title in (("matmul", "Matrix product, bf16, weight [N, K]"), ("attention", "Causal attention, bf16")):
        lines = [_cells(row) for row in rows if row.work == work]
        if lines:
            header = (
                "arch", "shape", "ours", "Triton", *METRICS.values(), "sectors of tables", "registers",
                "ours is worse in",
            )  # fmt: skip
            parts += [f"## {title}", "", table(header, lines), ""]
    parts += [f"Ours is worse in some count in {len(worse)} of {len(rows)} rows.", ""]
    parts += ["## Every configuration's main loop", ""]
    parts += [table(("kernel", "arch", "machine instructions / operation", "registers", "spilled bytes"), _loops(rows))]
    return "\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    ours, theirs = row.ours, row.triton
    pairs = [f"{getattr(ours, name):,} / {getattr(theirs, name):,}" for name in METRICS]
    tables = f"{ours.table_sectors:,} / {theirs.table_sectors:,}"
    registers = f"{ours.num_registers} / {theirs.num_registers}"
    worse = ", ".join(METRICS[name] for name in row.worse) or "none"
    return [row.arch, row.shape, f"{ours.name} {ours.tile}", theirs.tile, *pairs, tables, registers, worse]


def _loops(rows: Sequence[Row]) -> list[list[str]]:
    found = {}
    for row in rows:
        for each in (row.ours, *row.configurations):
            dim = f" {row.shape.split(', ')[-1]}" if row.work == "attention" else ""
            key = (f"{each.name} {row.work}{dim} {each.tile}", row.arch)
            found[key] = [*key, f"{each.machine_per_operation:.3f}", str(each.num_registers), str(each.spill_bytes)]
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 where `--check` finds ours worse; 2 without nvdisasm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=list(ARCHS))
    parser.add_argument("--only", default="", help='only rows that contain this: "matmul sm_80 256 x 256 x 512"')
    parser.add_argument("--nvdisasm", help="the disassembler; else from PATH or from an installed triton")
    parser.add_argument("--check", action="store_true", help="exit with 1 where ours is worse in any count")
    for name in ("json", "markdown"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    try:
        nvdisasm = find_nvdisasm(asked.nvdisasm)
    except NoDisassemblerError as error:
        print(f"compare_triton: {error}", file=sys.stderr)
        return 2
    rows = compare(asked.arch, nvdisasm, asked.only)
    if not rows:
        parser.error("no row contains that")
    print(as_markdown(rows))
    for file, write in ((asked.json, as_json), (asked.markdown, as_markdown)):
        if file is not None:
            file.write_text(write(rows))
    return int(asked.check and any(row.worse for row in rows))


if __name__ == "__main__":
    sys.exit(main())
