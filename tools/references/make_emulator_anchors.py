"""Compiles the anchors of the emulator: PTX that other compilers make from our sources (tools/references/anchors/).

Needs Triton, which compiles for an architecture without a GPU, and nvcc. Writes `<name>.ptx` and `anchors.json`, the
launches' parameters, into tests/runtime/emulator/anchors/; both are committed, so that the tests do not need the
compilers. Debug sections, comments and line marks are removed.

    python tools/references/make_emulator_anchors.py [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tools" / "references" / "anchors"
TARGET = ROOT / "tests" / "runtime" / "device" / "emulator" / "anchors"

# name: (kernel, arch, parameter types, compile-time numbers, options). "*bf16" is a pointer, 16-byte aligned; "i32:8"
# an integer that is a multiple of 8.
TRITON: dict[str, tuple[str, int, list[str], dict[str, int], dict[str, Any]]] = {
    "matmul_bf16_sm80": ("matmul", 80, ["*bf16", "*bf16", "*fp32", "i32", "i32:8", "i32:8"],
                         {"BM": 64, "BN": 64, "BK": 32}, {"num_warps": 4, "num_stages": 3}),
    "matmul_f16_nt_sm80": ("matmul_nt", 80, ["*fp16", "*fp16", "*fp16", "i32", "i32", "i32:8"],
                           {"BM": 64, "BN": 128, "BK": 32}, {"num_warps": 4, "num_stages": 4}),
    "matmul_tf32_sm80": ("matmul", 80, ["*fp32", "*fp32", "*fp32", "i32", "i32:4", "i32:4"],
                         {"BM": 64, "BN": 32, "BK": 32}, {"num_warps": 4, "num_stages": 2}),
    "matmul_s8_sm80": ("matmul", 80, ["*i8", "*i8", "*i32", "i32", "i32:16", "i32:16"],
                       {"BM": 64, "BN": 64, "BK": 64}, {"num_warps": 4, "num_stages": 2}),
    "matmul_e4m3_sm89": ("matmul_nt", 89, ["*fp8e4nv", "*fp8e4nv", "*fp32", "i32", "i32", "i32:16"],
                         {"BM": 64, "BN": 64, "BK": 64}, {"num_warps": 4, "num_stages": 2}),
    "matmul_bf16_sm90": ("matmul", 90, ["*bf16", "*bf16", "*bf16", "i32", "i32:8", "i32:8"],
                         {"BM": 64, "BN": 128, "BK": 64}, {"num_warps": 4, "num_stages": 3}),
    "matmul_e4m3_sm90": ("matmul_nt", 90, ["*fp8e4nv", "*fp8e4nv", "*fp32", "i32", "i32", "i32:16"],
                         {"BM": 128, "BN": 64, "BK": 128}, {"num_warps": 8, "num_stages": 2}),
    "matmul_tma_sm90": ("matmul_tma", 90, ["*bf16", "*bf16", "*bf16", "i32", "i32:8", "i32:8"],
                        {"BM": 128, "BN": 64, "BK": 64}, {"num_warps": 4, "num_stages": 3}),
    "matmul_tma_f16_small_sm90": ("matmul_tma", 90, ["*fp16", "*fp16", "*fp16", "i32", "i32:8", "i32:8"],
                                  {"BM": 64, "BN": 16, "BK": 32}, {"num_warps": 4, "num_stages": 2}),
    "matmul_warp_specialised_sm90": ("matmul_warp_specialised", 90,
                                     ["*bf16", "*bf16", "*fp32", "i32", "i32:8", "i32:8"],
                                     {"BM": 128, "BN": 128, "BK": 64}, {"num_warps": 4, "num_stages": 3}),
    "matmul_split_k_sm90": ("matmul_split_k", 90, ["*bf16", "*bf16", "*fp32", "i32", "i32:8", "i32:8"],
                            {"BM": 64, "BN": 32, "BK": 64}, {"num_warps": 4, "num_stages": 1}),
    "attention_sm80": ("attention", 80, ["*fp16", "*fp16", "*fp16", "*fp16", "i32", "fp32"],
                       {"HEAD": 64, "BM": 64, "BN": 32}, {"num_warps": 4, "num_stages": 2}),
    "attention_sm90": ("attention", 90, ["*bf16", "*bf16", "*bf16", "*bf16", "i32", "fp32"],
                       {"HEAD": 64, "BM": 128, "BN": 64}, {"num_warps": 4, "num_stages": 3}),
    "softmax_sm80": ("softmax", 80, ["*fp32", "*fp32", "i32"], {"BLOCK": 1024}, {"num_warps": 4}),
    "layer_norm_sm90": ("layer_norm", 90, ["*bf16", "*fp32", "*fp32", "*bf16", "i32", "fp32"], {"BLOCK": 2048},
                        {"num_warps": 8}),
    "atomics_sm80": ("atomics", 80, ["*i32", "*i32", "*i32", "*fp32", "*i32", "i32"], {"BLOCK": 256}, {"num_warps": 4}),
    "scan_sort_sm90": ("scan_sort", 90, ["*i32", "*i32", "*i32", "*i32", "i32"], {"BLOCK": 256}, {"num_warps": 4}),
    "casts_sm90": ("casts", 90, ["*fp32", "*fp8e4nv", "*fp8e5", "*fp16", "*bf16", "*fp32", "i32"], {"BLOCK": 512},
                   {"num_warps": 4}),
}  # fmt: skip

# name: (source, kernel, arch, threads, blocks a cluster)
NVCC: dict[str, tuple[str, str, str, int, int]] = {}


def trimmed(text: str) -> str:
    """The text without debug information."""
    kept, skipping = [], False
    for line in text.split("\n"):
        code = line.split("//", 1)[0].rstrip()
        if skipping:
            skipping = not code.startswith("}")
        elif code.lstrip().startswith(".section"):
            skipping = "}" not in code
        elif code.strip() and not code.lstrip().startswith((".loc", ".file", "@@DWARF")):
            kept.append(code)
    return re.sub(r"\.target (\S+), debug", r".target \1", "\n".join(kept)) + "\n"


def compile_triton(name: str) -> tuple[str, dict[str, Any]]:
    sys.path.insert(0, str(SOURCES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import triton
        import triton_kernels
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        kernel_name, arch, types, numbers, options = TRITON[name]
        kernel = getattr(triton_kernels, kernel_name)
        names = kernel.arg_names
        signature = {names[i]: kind.split(":")[0] for i, kind in enumerate(types)}
        signature |= dict.fromkeys(numbers, "constexpr")
        attributes = {}
        for index, kind in enumerate(types):
            multiple = 16 if kind[0] == "*" else int((kind.split(":") + ["1"])[1])
            if multiple > 1:
                attributes[(index,)] = [["tt.divisibility", multiple]]
        constants = {(names.index(key),): value for key, value in numbers.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    facts: dict[str, Any] = {
        "compiler": f"triton {triton.__version__}",
        "kernel": made.metadata.name,
        "arch": f"sm_{arch}a" if arch == 90 else f"sm_{arch}",
        "threads": 32 * made.metadata.num_warps,
        "shared_bytes": made.metadata.shared,
        "scratch_bytes": made.metadata.global_scratch_size,
        "cluster": made.metadata.num_ctas,
        "numbers": numbers,
    }
    return made.asm["ptx"], facts


def compile_nvcc(name: str) -> tuple[str, dict[str, Any]]:
    source, kernel, arch, threads, cluster = NVCC[name]
    command = ["nvcc", "-ptx", f"-arch={arch}", "-std=c++17", "-o", "-", str(SOURCES / source)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True, encoding="utf-8").stdout
    facts: dict[str, Any] = {
        "compiler": "nvcc " + re.search(r"release ([\d.]+)", version)[1],  # type: ignore[index]
        "kernel": kernel, "arch": arch, "threads": threads, "shared_bytes": 0, "scratch_bytes": 0, "cluster": cluster,
        "numbers": {},
    }  # fmt: skip
    return text, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="anchors to make; all without one")
    names = parser.parse_args().names or [*TRITON, *NVCC]
    TARGET.mkdir(exist_ok=True)
    index_file = TARGET / "anchors.json"
    index = json.loads(index_file.read_text(encoding="utf-8")) if index_file.exists() else {}
    for name in names:
        text, facts = compile_triton(name) if name in TRITON else compile_nvcc(name)
        (TARGET / f"{name}.ptx").write_text(trimmed(text), encoding="utf-8")
        index[name] = facts
        print(f"{name}: {len(trimmed(text)) / 1024:.0f} KiB, {facts['compiler']}")
    index = {name: index[name] for name in [*TRITON, *NVCC] if name in index}
    index_file.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
