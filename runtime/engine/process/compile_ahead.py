"""Compiles before anything is loaded, in processes that free the compiler's memory when they end.

LLVM and numba keep 100 MB and more of compiler state for the life of a process, which neither a server nor its engine
should hold. The engine's process therefore first runs several compiler processes. Those for the CPU also compile the
tokenizer's loops: `python -m runtime.engine.process.compile_ahead STORED IS_INT8 BLOCK_SIZE PAGES HAS_EXPERTS [FORMATS]
WORK_ITEMS`. Those for a GPU, real or emulated, are `compile_kernels`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path

import tokenizer
from models.checkpoints.hub import resolve_model
from models.checkpoints.model_files import open_model
from models.configuration.config import load_dtype
from models.experts import MoeConfig
from models.registry import load_config
from numba_kernels.cache_files import locked
from runtime.device.device import Device
from runtime.device.errors import CompileError
from runtime.dtype import KV_DTYPES, PAGES, STORED, DType, float32
from runtime.engine.config import EngineConfig
from runtime.engine.process import compilers
from runtime.engine.process.parent import end_with_parent
from runtime.errors import XservError
from runtime.linear.format import GGML_FORMATS, GROUP_FORMATS
from runtime.linear.kept import kept_format
from runtime.linear.options import LoadOptions
from runtime.own_packages import python_module
from runtime.progress import Reporter, Show

ROUNDED_BLOCKS = {"int4": "Q4_0", "mxfp4": "MXFP4", "fp8": "fp8"}
"""The block formats of ggml in which the CPU keeps weights, by `--quantization`."""

DONE = b"done\n"
MOST_TASKS = 256

logger = logging.getLogger("xserv.engine")


def compile_ahead(model: str | Path | None, config: EngineConfig, reporter: Reporter) -> None:
    """Makes sure that the code of an engine is compiled on disk, and shows the progress. A server calls it before the
    kernels are imported.

    If nothing can be compiled for the CPU, or the kernels for a GPU are unknown, code is compiled on first use, with a
    warning. The arguments are ``engine_of``'s, which validates them. Raises ``ModelLoadError``, ``DeviceError``;
    ``CompileError`` for a kernel that does not compile.
    """
    device = Device.parse(config.device)
    if device.kind != "cpu":
        _compile_kernels(model, config, device, reporter)
        return
    path = resolve_model(None if model is None else str(model), reporter)
    kept = load_dtype(path, config.hf_overrides) or float32
    weights = kept if config.dtype == "auto" else DType.parse(config.dtype)
    if weights not in STORED:
        return
    pages = PAGES[KV_DTYPES.get(config.kv_cache_dtype, weights)]
    arguments = [STORED[weights].__name__, str(int(config.quantization == "int8")), str(config.block_size)]
    arguments += [pages.__name__, str(int(isinstance(load_config(path, config.hf_overrides), MoeConfig)))]
    arguments += sorted(_block_formats(path, config) & (GGML_FORMATS.keys() | GROUP_FORMATS.keys()))
    done = marker(*arguments)
    if done.exists():
        return
    logger.info("compiling for this processor, once")
    with reporter.shown("compiling for this processor, once") as show, locked(done):
        if not done.exists() and _compile_elsewhere(arguments, show):
            with suppress(OSError):  # a read-only disk: it is only done again
                done.touch()


def _block_formats(path: Path, config: EngineConfig) -> set[str]:
    """Names of the formats in which the CPU keeps matrices, including those of GGUF files."""
    if config.quantization in ROUNDED_BLOCKS:
        return {ROUNDED_BLOCKS[config.quantization]}
    if config.dtype != "auto" or config.quantization != "none" or config.load_format == "dummy":
        return set()
    options = LoadOptions(activations=config.activations)
    checkpoint = open_model(path, config.hf_overrides).checkpoint()
    if path.is_file():
        return set() if options.has_float_activations else set(checkpoint.bytes_by_format())
    layouts = [layout for name in checkpoint.names() if (layout := checkpoint.quantized(name))]
    return {format.name for layout in layouts if (format := kept_format(layout, options))}


def _compile_kernels(model: str | Path | None, config: EngineConfig, device: Device, reporter: Reporter) -> None:
    from runtime.device.gpu import Gpu
    from runtime.device.kernel_cache import KernelCache
    from runtime.engine.process.compile_kernels import Wanted, compile_kernels

    folder, arch = resolve_model(None if model is None else str(model), reporter), Gpu.of(device).arch
    wanted = Wanted(arch=arch, is_ptx=device.kind == "emulated", model=str(folder), config=config)
    done = KernelCache().marker(wanted.digest())
    if done.exists():
        return
    with locked(done), reporter.shown(f"compiling kernels for {arch}") as show:
        if done.exists():
            return
        try:
            found = compile_kernels(wanted, show)
        except CompileError:
            raise
        except XservError as error:
            logger.warning("which kernels the model needs is not known; they are compiled as they are met: %s", error)
            return
        with suppress(OSError):  # a read-only disk: it is only done again
            done.touch()
    logger.info("%d kernels for %s: %d were compiled", found.num_done, arch, found.num_new)


def marker(*arguments: str) -> Path:
    """The marker file of finished work, for these sources and this processor."""
    import llvmlite.binding as llvm

    from numba_kernels.cpu import CODE_FOLDER
    from numba_kernels.source_digests import sources_digest

    loops = sources_digest(*Path(tokenizer.__file__).parent.rglob("*.py"))
    words = f"{arguments} {loops} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return CODE_FOLDER / f"ahead-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def _compile_elsewhere(arguments: Sequence[str], show: Show) -> bool:
    """Runs the tasks in one process for each processor; returns whether all were done. The numbers of the tasks lie as
    bytes in a pipe, from which each process takes the next one until it is empty."""
    work_items, writer = os.pipe()
    os.write(writer, bytes(range(MOST_TASKS)))
    os.close(writer)
    command = [*python_module("runtime.engine.process.compile_ahead"), *arguments, str(work_items)]
    num_done, total = 0, None
    try:
        with closing(compilers.lines_of([command] * compilers.num_processes(), pass_fds=(work_items,))) as lines:
            for line in lines:
                if line == DONE:
                    num_done += 1
                else:
                    total = int(line)
                show(num_done, total)
    except CompileError as error:
        logger.warning("not all kernels could be compiled ahead; the others are compiled at first use: %s", error)
        return False
    finally:
        os.close(work_items)
    return True


def main(*arguments: str) -> None:
    """One of the processes: it writes the number of tasks as soon as it knows, and DONE after each of its own."""
    end_with_parent()

    def write(line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    *wanted, work_items = arguments
    tasks = _tasks(*wanted)
    known: list[Callable[[], object]] = []
    while work_item := os.read(int(work_items), 1):
        known += islice(tasks, work_item[0] + 1 - len(known))
        if work_item[0] >= len(known):
            break
        known[work_item[0]]()
        write(DONE)
    known += tasks
    if len(known) > MOST_TASKS:
        raise CompileError(f"{len(known)} kernels are wanted ahead, at most {MOST_TASKS} can be")
    write(b"%d\n" % len(known))


def _tasks(
    stored: str, is_int8: str, block_size: str, pages: str, has_experts: str, *formats: str
) -> Iterator[Callable[[], object]]:
    """The tasks: first the tokenizer's loops, which a process can start before it imports the kernels; then the kernels
    in the order of `kernels_of`, the slowest first."""
    from tokenizer.warm_up import LOOPS

    yield from LOOPS
    from numba_kernels.cpu.running.ahead import kernels_of

    wanted = kernels_of(
        stored, bool(int(is_int8)), int(block_size), formats, pages=pages, has_experts=bool(int(has_experts))
    )
    for factory, values in wanted:
        yield partial(factory, *values)


if __name__ == "__main__":
    main(*sys.argv[1:])
