"""`xserv kernels build | list | clear`: the compiled GPU kernels on disk."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

kernels = typer.Typer(name="kernels", help="Compiled GPU kernels on disk: build, list, clear.", rich_markup_mode=None)


@kernels.callback()
def _kernels() -> None:
    """Compiled GPU kernels on disk: build, list, clear. No GPU is needed."""


@kernels.command()
def build(
    arch: Annotated[str, typer.Option(help="Architecture: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a.")] = "sm_90a",
    image: Annotated[
        Literal["cubin", "ptx"], typer.Option(help="cubin for a GPU; ptx for an emulated device.")
    ] = "cubin",
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="PATH|HUB_ID", help="Only the kernels that this model needs.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], typer.Option(help="With --model: type of its weights.")
    ] = "auto",
    match: Annotated[str, typer.Option(help="Only kernels whose name holds this.")] = "",
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write them as one file, for a machine without the compiler."),
    ] = None,
) -> None:
    """Compile kernels ahead of time, so that no start does: all that there are, or those of a model."""
    from runtime.device.driver import cuda_bindings

    cuda_bindings("the kernels' compiler")  # before anything is imported that needs it
    from numba_kernels.cuda.registry import specialisations
    from runtime.commands.model_kernels import kernels_of_model
    from runtime.device.kernel_bundle import write_bundle
    from runtime.device.kernel_cache import KernelCache, is_meant_for
    from runtime.errors import InvalidArgumentError

    cache = KernelCache()
    known = specialisations() if model is None else kernels_of_model(model, arch, dtype)
    wanted = [each for each in known if match in each.name and is_meant_for(each, arch)]
    if not wanted:
        raise InvalidArgumentError(f"no kernel for {arch} has {match!r} in its name", param="match")
    start = time.perf_counter()
    num_spilling, compiled = 0, []
    for number, specialisation in enumerate(wanted, 1):
        print(f"\r{number}/{len(wanted)} {specialisation.name[:60]:<60}", end="", file=sys.stderr)
        compiled.append(cache.get(specialisation, arch, is_ptx=image == "ptx"))
        num_spilling += compiled[-1].spill_bytes > 0
    print(file=sys.stderr)
    spilling = f"; {num_spilling} spill registers" if num_spilling else ""
    print(
        f"{len(wanted)} kernels for {arch}: {cache.num_compiled} compiled in {time.perf_counter() - start:.1f} s, "
        f"{cache.num_read} were there{spilling}: {cache.folder}"
    )
    if bundle is not None:
        write_bundle(bundle, list(zip(wanted, compiled)))
        print(f"{len(compiled)} kernels and their manifest: {bundle}")


@kernels.command("list")
def list_() -> None:
    """Show what is there: name, architecture, bytes, registers."""
    from runtime.device.kernel_cache import KernelCache

    cache = KernelCache()
    count = size = 0
    for entry in cache.entries():
        count, size = count + 1, size + entry.size_bytes
        kernel = entry.kernel
        note = "" if entry.is_current else "  (of other sources)"
        if kernel is None:
            print(f"{entry.path.name}: corrupt, and compiled anew when it is needed")
            continue
        registers = "" if kernel.is_ptx else f"{kernel.num_registers:>4} registers"
        kind = "ptx" if kernel.is_ptx else "cubin"
        print(f"{kernel.name:<60}{kernel.arch:<8} {kind:<6}{entry.size_bytes:>9,} B{registers}{note}")
    for bundle in cache.bundles:
        note = "" if bundle.is_current else "  (of other sources)"
        print(f"{bundle.path.name}: {len(bundle)} kernels for {bundle.arch}, {bundle.image_kind}{note}")
    print(f"{count} kernels, {size:,} B, and {cache.ir_bytes():,} B of LLVM IR: {cache.folder}")


@kernels.command()
def clear() -> None:
    """Remove all of them."""
    from runtime.device.kernel_cache import KernelCache

    cache = KernelCache()
    print(f"{cache.clear()} kernels removed: {cache.folder}")
