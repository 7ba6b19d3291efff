"""Compiling before anything is loaded, in processes that take the compiler's memory with them.

LLVM and numba keep 100 MB and more of what they have compiled from, as long as the process lives: neither a server nor
its engine is to hold them. So the engine's process has its kernels compiled first. For the cpu, and with them the
tokenizer's loops, one process does it, and ends: `python -m runtime.engine.process.compile_ahead STORED IS_INT8
BLOCK_SIZE PAGES HAS_EXPERTS [FORMATS]`. For a GPU, real or emulated, there are several (`compile_kernels`).
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
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
from runtime.engine.process.parent import end_with_parent
from runtime.errors import XservError
from runtime.linear.format import GGML_FORMATS, GROUP_FORMATS
from runtime.linear.kept import kept_format
from runtime.linear.options import LoadOptions
from runtime.own_packages import python_module
from runtime.progress import Reporter, Show

ROUNDED_BLOCKS = {"int4": "Q4_0", "mxfp4": "MXFP4", "fp8": "fp8"}
"""In which of ggml's blocks the cpu keeps what `--quantization` asks for."""

logger = logging.getLogger("xserv.engine")


def compile_ahead(model: str | Path | None, config: EngineConfig, reporter: Reporter) -> None:
    """Sees to it that what an engine needs lies compiled on the disk, and shows how far it is. A server calls it before
    anything wakes the kernels.

    Where nothing can be compiled for the cpu, or nobody can tell what a GPU needs, code is compiled when it is used
    first, and a warning says so. Arguments are ``engine_of``'s, which is left to refuse them. Raises
    ``ModelLoadError``, ``DeviceError``; ``CompileError`` for a kernel that does not compile.
    """
    device = Device.parse(config.device)
    if device.kind != "cpu":
        _compile_kernels(model, config, device, reporter)
        return
    path = resolve_model(None if model is None else str(model), reporter)
    kept = load_dtype(path) or float32
    weights = kept if config.dtype == "auto" else DType.parse(config.dtype)
    if weights not in STORED:
        return
    pages = PAGES[KV_DTYPES.get(config.kv_cache_dtype, weights)]
    arguments = [STORED[weights].__name__, str(int(config.quantization == "int8")), str(config.block_size)]
    arguments += [pages.__name__, str(int(isinstance(load_config(path), MoeConfig)))]
    arguments += sorted(_block_formats(path, config) & (GGML_FORMATS.keys() | GROUP_FORMATS.keys()))
    done = marker(*arguments)
    if done is None or done.exists():
        return
    logger.info("compiling for this processor, once")
    with reporter.shown("compiling for this processor, once") as show, locked(done):
        if not done.exists():
            _compile_elsewhere(arguments, show)


def _block_formats(path: Path, config: EngineConfig) -> set[str]:
    """Names of the formats that the cpu keeps matrices in, those of GGUF files among them."""
    if config.quantization in ROUNDED_BLOCKS:
        return {ROUNDED_BLOCKS[config.quantization]}
    if config.dtype != "auto" or config.quantization != "none" or config.load_format == "dummy":
        return set()
    checkpoint = open_model(path).checkpoint()
    if path.is_file():
        return set(checkpoint.bytes_by_format())
    layouts = [layout for name in checkpoint.names() if (layout := checkpoint.quantized(name))]
    return {format.name for layout in layouts if (format := kept_format(layout, LoadOptions()))}


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
        with suppress(OSError):  # a disk that cannot be written: it is only done again
            done.touch()
    logger.info("%d kernels for %s: %d were compiled", found.num_done, arch, found.num_new)


def marker(*arguments: str) -> Path | None:
    """The file that says that it is done, by these sources and for this processor; None where code is not kept."""
    import llvmlite.binding as llvm

    from numba_kernels.cache import is_kept, sources_digest
    from numba_kernels.cpu import CODE_FOLDER

    if not is_kept(CODE_FOLDER):
        return None
    loops = sources_digest(*Path(tokenizer.__file__).parent.rglob("*.py"))
    words = f"{arguments} {loops} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return CODE_FOLDER / f"ahead-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def _compile_elsewhere(arguments: Sequence[str], show: Show) -> None:
    command = [sys.executable, "-P", *python_module("runtime.engine.process.compile_ahead"), *arguments]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said) as child:
            assert child.stdout is not None
            for line in child.stdout:
                done, total = line.split()
                show(int(done), int(total))
        said.seek(0)
        words = said.read().decode(errors="replace")
    if child.returncode:
        logger.warning("nothing could be compiled ahead (status %d): %s", child.returncode, words[-2000:])


def main(*arguments: str) -> None:
    end_with_parent()
    from numba_kernels.cpu.running.ahead import kernels_of
    from tokenizer.warm_up import warm_up

    stored, is_int8, block_size, pages, has_experts, *formats = arguments
    wanted = list(
        kernels_of(
            stored, bool(int(is_int8)), int(block_size), formats, pages=pages, has_experts=bool(int(has_experts))
        )
    )
    for number, (factory, values) in enumerate(wanted):
        print(number, len(wanted) + 1, flush=True)
        factory(*values)
    print(len(wanted), len(wanted) + 1, flush=True)
    warm_up()
    done = marker(*arguments)
    if done is not None:
        done.touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
