"""`xserv kernels build | list | clear`: the compiled GPU kernels on disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from runtime.commands import later
from runtime.engine.config import EngineConfig
from runtime.errors import InvalidArgumentError
from runtime.progress import ON_STDERR

_hub = later("models.checkpoints.hub")
_driver = later("runtime.device.driver")
_compiled_kernel = later("runtime.device.compiled_kernel")
_kernel_cache = later("runtime.device.kernel_cache")
_compile_kernels = later("runtime.engine.process.compile_kernels")

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
    """Compile kernels ahead of time: all, or those of a model."""
    _driver.cuda_bindings("the kernels' compiler")  # before any import that needs it
    folder = None if model is None else str(_hub.resolve_model(model))
    wanted = _compile_kernels.Wanted(
        arch=arch, is_ptx=image == "ptx", model=folder, config=EngineConfig(dtype=dtype), match=match
    )
    start = time.perf_counter()
    with ON_STDERR.shown(f"compiling kernels for {arch}") as show:
        done = _compile_kernels.compile_kernels(wanted, show)
    if not done.num_done:
        raise InvalidArgumentError(f"no kernel for {arch} has {match!r} in its name", param="match")
    cache = _kernel_cache.KernelCache()
    spilling = f"; {done.num_spilling} spill registers" if done.num_spilling else ""
    print(
        f"{done.num_done} kernels for {arch}: {done.num_new} compiled in {time.perf_counter() - start:.1f} s, "
        f"{done.num_there} were there{spilling}: {cache.folder}"
    )
    if bundle is not None:
        found = [(each, cache.get(each, arch, is_ptx=wanted.is_ptx)) for each in wanted.find()]
        _compiled_kernel.write_bundle(bundle, found)
        print(f"{len(found)} kernels and their manifest: {bundle}")


@kernels.command("list")
def list_() -> None:
    """Show the kernels: name, architecture, bytes, registers."""
    cache = _kernel_cache.KernelCache()
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
    cache = _kernel_cache.KernelCache()
    print(f"{cache.clear()} kernels removed: {cache.folder}")
