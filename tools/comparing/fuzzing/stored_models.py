"""A model of float32 stored in another format: what `fuzz_adapters.py` serves, and a folder of the floats that it
means, which transformers reads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Ggml

from models.checkpoints.safetensors_file import SafetensorsFile
from tests.models.folders import Array, write_safetensors
from tests.models.gguf.files import random_blocks, write_gguf
from tests.models.quantized.quantisers import FORMATS

_IN_FLOATS = ("embed", "lm_head", ".gate.weight", "router", "norm", "wte", "wpe")
"""Parts of names of matrices that stay as they are."""


def store(folder: Path, form: str) -> tuple[Path, Path]:
    """The folder or file to serve, and the folder of its floats, both inside this folder of a float32 model."""
    if form == "dense":
        return folder, folder
    file = SafetensorsFile(folder / "model.safetensors")
    tensors = {name: file.array(name).astype(np.float32) for name in file.tensors}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    floats, served = folder / "floats", folder / "stored"
    means, stored, ignored = dict(tensors), dict(tensors), []
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or module == name:
            continue
        if any(part in name for part in _IN_FLOATS):
            ignored.append(module)
        elif form in FORMATS:
            parts, means[name] = FORMATS[form][0](weight)
            del stored[name]
            stored |= {f"{module}.{part}": array for part, array in parts.items()}
        else:
            stored[name], means[name] = _blocks(name, weight, Ggml[form], config["model_type"])
    floats.mkdir()
    (floats / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(floats / "model.safetensors", means)
    if form not in FORMATS:
        assert form == "F16" or any(array.dtype == np.uint8 for array in stored.values()), "no matrix has blocks"
        path = folder / "stored.gguf"
        is_map = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down)\w*)\.weight")
        type_of = Ggml[form]
        return write_gguf(
            path, config, stored, type_of=lambda name: type_of if is_map.fullmatch(name) else Ggml.F32
        ), floats
    served.mkdir()
    quantization = FORMATS[form][1](ignored)
    (served / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}), encoding="utf-8")
    write_safetensors(served / "model.safetensors", stored)
    if (generation := folder / "generation_config.json").exists():
        shutil.copy(generation, served)
    return served, floats


def _blocks(name: str, weight: Array, form: Ggml, kind: str) -> tuple[Array, Array]:
    """A matrix's blocks, random where the gguf package cannot quantise, and their floats."""
    if form == Ggml.F16:
        return weight, weight.astype(np.float16).astype(np.float32)
    turned = np.ascontiguousarray(weight.T) if kind == "gpt2" else weight
    try:
        blocks = gguf.quantize(turned, form)
    except NotImplementedError:
        rng = np.random.default_rng([len(name), *name.encode()])
        blocks = random_blocks(rng, form, turned.shape)
        steps = np.abs(gguf.dequantize(blocks, form)).mean() * np.sqrt(turned.shape[1])
        blocks = random_blocks(rng, form, turned.shape, float(1 / steps))
    floats = gguf.dequantize(blocks, form).astype(np.float32)
    return blocks, np.ascontiguousarray(floats.T) if kind == "gpt2" else floats
