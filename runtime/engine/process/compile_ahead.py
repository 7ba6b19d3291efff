"""Compiles before anything is loaded, in processes that free the compiler's memory when they end.

LLVM and numba keep 100 MB and more of compiler state for the life of a process, which neither a server nor its engine
should hold. The engine's process therefore first runs several compiler processes (`compile_kernels`): for the CPU and
the tokenizer's loops, or for a GPU, real or emulated.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from models.checkpoints.hub import resolve_model
from models.checkpoints.model_files import open_model
from models.configuration.config import load_dtype
from models.encoder import EncoderConfig
from models.experts import MoeConfig
from models.registry import load_config
from numba_kernels.cache_files import locked
from runtime.device.device import Device
from runtime.device.errors import CompileError
from runtime.device.gpu import Gpu
from runtime.dtype import KV_DTYPES, PAGES, STORED, DType, bfloat16, float32
from runtime.engine.config import EngineConfig
from runtime.engine.logits.processors import load_processors
from runtime.engine.process.compile_kernels import Wanted, WantedOfCpu, compile_kernels
from runtime.errors import XservError
from runtime.linear.format import GGML_FORMATS, GROUP_FORMATS
from runtime.linear.kept import kept_format
from runtime.linear.options import LoadOptions
from runtime.progress import Reporter

ROUNDED_BLOCKS = {"int4": "Q4_0", "mxfp4": "MXFP4", "fp8": "fp8"}
"""The block formats of ggml in which the CPU keeps weights, by `--quantization`."""

logger = logging.getLogger("xserv.engine")


def compile_ahead(model: str | Path | None, config: EngineConfig, reporter: Reporter) -> None:
    """Makes sure that the code of an engine is compiled on disk, and shows the progress. A server calls it before the
    kernels are imported.

    If nothing can be compiled for the CPU, or the kernels for a GPU are unknown, code is compiled on first use, with a
    warning. The arguments are ``engine_of``'s, which validates them. Raises ``ModelLoadError``, ``DeviceError``;
    ``CompileError`` for a kernel that does not compile; ``RequestError`` for a logits processor that cannot be loaded.
    """
    device = Device.parse(config.device)
    load_processors(config.logits_processors, str(device), makes=False)  # raises before anything is compiled
    config = replace(config, logits_processors=())  # those of the user are compiled with the engine
    path = resolve_model(None if model is None else str(model), reporter)
    wanted: Wanted | WantedOfCpu | None
    if device.kind == "cpu":
        wanted, title = wanted_of_cpu(path, config), "compiling for this processor, once"
    else:
        arch = Gpu.of(device).arch
        wanted = Wanted(arch=arch, is_ptx=device.kind == "emulated", model=str(path), config=config)
        title = f"compiling kernels for {arch}"
    if wanted is None or (done := wanted.marker()).exists():
        return
    if isinstance(wanted, WantedOfCpu):
        logger.info(title)
    with locked(done), reporter.shown(title) as show:
        if done.exists():
            return
        try:
            found = compile_kernels(wanted, show)
        except XservError as error:
            if isinstance(wanted, WantedOfCpu):
                logger.warning(
                    "not all kernels could be compiled ahead; the others are compiled at first use: %s", error
                )
            elif isinstance(error, CompileError):
                raise
            else:
                logger.warning(
                    "which kernels the model needs is not known; they are compiled as they are met: %s", error
                )
            return
        with suppress(OSError):  # a read-only disk: it is only done again
            done.touch()
    if isinstance(wanted, Wanted):
        logger.info("%d kernels for %s: %d were compiled", found.num_done, wanted.arch, found.num_new)


def wanted_of_cpu(path: Path, config: EngineConfig) -> WantedOfCpu | None:
    """The CPU's code for a model; None for a type of weights that loading refuses."""
    kept = load_dtype(path, config.hf_overrides, config.mmproj) or float32
    weights = kept if config.dtype == "auto" else DType.parse(config.dtype)
    if weights not in STORED:
        return None
    model_config = load_config(path, config.hf_overrides, config.mmproj)
    is_encoder, usual = isinstance(model_config, EncoderConfig), weights
    is_file = path.is_file() and config.dtype == "auto" and config.load_format != "dummy"
    if is_file and open_model(path, config.hf_overrides, config.mmproj).checkpoint().is_in_blocks():
        usual = bfloat16
    return WantedOfCpu(
        stored=STORED[weights].__name__,
        is_int8=config.quantization == "int8",
        block_size=config.block_size,
        pages=PAGES[KV_DTYPES.get(config.kv_cache_dtype, float32 if is_encoder else usual)].__name__,
        has_experts=isinstance(model_config, MoeConfig) and len(model_config.dense_layers) < model_config.num_layers,
        formats=sorted(_block_formats(path, config) & (GGML_FORMATS.keys() | GROUP_FORMATS.keys())),
        recurrence=model_config.recurrence,
        states=STORED[DType.parse(config.state_dtype)].__name__,
        has_latents=model_config.latent_values > 0,
        has_adapters=config.enable_lora,
        is_encoder=is_encoder,
    )


def _block_formats(path: Path, config: EngineConfig) -> set[str]:
    """Names of the formats in which the CPU keeps matrices, including those of GGUF files."""
    if config.quantization in ROUNDED_BLOCKS:
        return {ROUNDED_BLOCKS[config.quantization]}
    if config.dtype != "auto" or config.quantization != "none" or config.load_format == "dummy":
        return set()
    options = LoadOptions(activations=config.activations)
    checkpoint = open_model(path, config.hf_overrides, config.mmproj).checkpoint()
    if path.is_file():
        kept = {checkpoint[name].block_format or "" for name in checkpoint.tensors}
        kept |= {kind or "" for name in checkpoint.tensors for kind in checkpoint[name].head_formats.values()}
        return set() if options.has_float_activations else kept
    layouts = [layout for name in checkpoint.tensors if (layout := checkpoint[name].quantized)]
    return {format.name for layout in layouts if (format := kept_format(layout, options))}
