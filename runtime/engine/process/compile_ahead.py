"""Compiling before anything is loaded, in a process that takes the compiler's memory with it.

LLVM and numba keep 100 MB and more of what they have compiled from, as long as the process lives: neither a server nor
its engine is to hold them. So the engine's process has its kernels and the tokenizer's loops compiled first:
`python -m runtime.engine.process.compile_ahead STORED IS_INT8 BLOCK_SIZE` is the process that does it, and ends.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import tokenizer
from models.config import load_dtype
from models.hub import resolve_model
from numba_kernels.cache_files import locked
from runtime.device.device import Device
from runtime.dtype import STORED, DType, float32
from runtime.engine.config import EngineConfig

logger = logging.getLogger("xserv.engine")


def compile_ahead(model: str | Path | None, config: EngineConfig) -> None:
    """Sees to it that what an engine on the cpu needs lies compiled on the disk. To be called before anything wakes the
    kernels. Where it fails, code is compiled when it is used first, and a warning says so.

    Arguments are ``engine_of``'s, which is left to refuse them. Raises ``ModelLoadError``, ``DeviceError``.
    """
    if Device.parse(config.device).kind != "cpu":
        return
    kept = load_dtype(resolve_model(None if model is None else str(model))) or float32
    weights = kept if config.dtype == "auto" else DType.parse(config.dtype)
    if weights not in STORED:
        return
    arguments = STORED[weights].__name__, str(int(config.quantization == "int8")), str(config.block_size)
    done = marker(*arguments)
    if done is None or done.exists():
        return
    logger.info("compiling for this processor, once")
    with locked(done):
        if not done.exists():
            _compile_elsewhere(arguments)


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


def _compile_elsewhere(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-P", "-m", "runtime.engine.process.compile_ahead", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        words = child.stderr.read().decode(errors="replace")
    if child.returncode:
        logger.warning("nothing could be compiled ahead (status %d): %s", child.returncode, words[-2000:])


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main(*arguments: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from numba_kernels.cpu.ahead import kernels_of
    from tokenizer.warm_up import warm_up

    stored, is_int8, block_size = arguments
    for factory, values in kernels_of(stored, bool(int(is_int8)), int(block_size)):
        factory(*values)
    warm_up()
    done = marker(*arguments)
    if done is not None:
        done.touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
