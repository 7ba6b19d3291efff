"""Compiles the Triton kernels that ours are compared with, for each configuration of the tutorials' tuners.

Needs Triton, which compiles without a GPU. Writes `<name>.ptx` and `peers.json`, the launches' parameters, into
tools/comparing/triton_comparison/ptx/; both are committed, so that the comparison does not need Triton.

    python tools/references/make_triton_peers.py

The configurations are those of Triton 3's tutorials: of 03-matrix-multiplication all for 16-bit
factors; of 06-fused-attention (tiles of 64 or 128 queries by 32 to 128 keys, 2 to 4 stages, 4 or 8 warps; not 8 warps
on Hopper below 128 x 128) a choice of the large tiles. For experts they are our tiles, with the stages and warps
of the tutorial's nearest tile.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.references.make_emulator_anchors import SOURCES, trimmed  # noqa: E402

TARGET = ROOT / "tools" / "comparing" / "triton_comparison" / "ptx"
ARCHS = (80, 90)
GROUP = 8
MATMULS = [(128, 256, 64, 3, 8), (128, 128, 32, 4, 4)]  # rows, columns, depth of a tile, stages, warps
ATTENTIONS = {80: (128, 64, 3, 8), 90: (128, 128, 2, 8)}  # of an architecture: queries, keys of a tile, stages, warps
HEAD_DIM = 128
EXPERTS = {  # as MATMULS, of an architecture
    80: [(128, 128, 32, 4, 4), (64, 64, 64, 3, 4), (16, 64, 64, 4, 4)],
    90: [(128, 256, 64, 3, 8), (64, 256, 64, 3, 4), (16, 64, 64, 4, 4)],
}
TOP_K = 2


def main() -> None:
    sys.path.insert(0, str(SOURCES))
    TARGET.mkdir(exist_ok=True)
    for old in TARGET.glob("*.ptx"):
        old.unlink()
    index = {}
    for arch in ARCHS:
        for rows, columns, depth, stages, warps in MATMULS:
            name = f"matmul_{rows}x{columns}x{depth}_s{stages}_w{warps}_sm{arch}"
            numbers = {"BM": rows, "BN": columns, "BK": depth, "GROUP": GROUP}
            types = ["*bf16", "*bf16", "*bf16", *["i32:16"] * 6]
            index[name] = _make(name, "matmul", arch, types, numbers, stages, warps)
        for rows, columns, depth, stages, warps in EXPERTS[arch]:
            name = f"experts_{rows}x{columns}x{depth}_s{stages}_w{warps}_sm{arch}"
            numbers = {"BM": rows, "BN": columns, "BK": depth, "GROUP": GROUP, "TOP_K": TOP_K}
            types = ["*bf16", "*bf16", "*bf16", "*i32", "*i32", "*i32", "i32", *["i32:16"] * 6]
            index[name] = _make(name, "experts", arch, types, numbers, stages, warps)
        rows, keys, stages, warps = ATTENTIONS[arch]
        name = f"attention_d{HEAD_DIM}_{rows}x{keys}_s{stages}_w{warps}_sm{arch}"
        has_maps = arch >= 90
        numbers = {"HEAD": HEAD_DIM, "BM": rows, "BN": keys, "HAS_MAPS": has_maps}
        heights = (rows, keys, keys, rows)
        tensors = [f"tensordesc<bf16[{size}, {HEAD_DIM}]>" if has_maps else "*bf16" for size in heights]
        types = ["fp32", "*fp32", *tensors, "i32", "i32:16"]
        index[name] = _make(name, "attention", arch, types, numbers, stages, warps)
    (TARGET / "peers.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _make(
    name: str, kernel_name: str, arch: int, types: list[str], numbers: dict[str, Any], stages: int, warps: int
) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import triton
        import triton.language as tl
        import triton_experts
        import triton_tutorials
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        kernel = getattr(triton_experts if kernel_name == "experts" else triton_tutorials, kernel_name)
        names = kernel.arg_names
        values = numbers | ({"DTYPE": tl.bfloat16} if "DTYPE" in names else {})
        signature = {names[i]: kind.split(":")[0] for i, kind in enumerate(types)} | dict.fromkeys(values, "constexpr")
        attributes = {
            (i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind[0] == "*" or kind.endswith(":16")
        }
        constants = {(names.index(key),): value for key, value in values.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": warps, "num_stages": stages}
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    text = trimmed(made.asm["ptx"])
    (TARGET / f"{name}.ptx").write_text(text, encoding="utf-8")
    maps = [
        {"box": list(each["block_size"]), "swizzle": int(each["swizzle"])}
        for each in getattr(made.metadata, "tensordesc_meta", None) or []
    ]
    print(f"{name}: {len(text) / 1024:.0f} KiB, {made.metadata.shared} bytes of shared memory")
    return {
        "compiler": f"triton {triton.__version__}", "work": kernel_name, "kernel": made.metadata.name,
        "arch": f"sm_{arch}a" if arch == 90 else f"sm_{arch}", "threads": 32 * made.metadata.num_warps,
        "shared_bytes": made.metadata.shared, "scratch_bytes": made.metadata.global_scratch_size,
        "stages": stages, "warps": warps, "numbers": numbers, "maps": maps,
    }  # fmt: skip


if __name__ == "__main__":
    main()
