"""The workloads of `bench peers`, their models, and the weights' types.

Model folders have GPT-2's and Qwen3's shapes with seeded random weights, in the form that any engine reads; all sides
load the same file. Weights are initialised like GPT-2's (normal, 0.02; residual projections scaled by
1/sqrt(2 * layers)), but with random biases and norms, so that verification catches a side that leaves one out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from models.registry import declare
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.roofline import PRESETS


@dataclass(frozen=True, slots=True)
class Gpt2Shape:
    """A GPT-2's dimensions; the defaults are those of the 124M model."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    vocab_size: int = 50257
    max_positions: int = 1024


def write_gpt2_folder(folder: Path, shape: Gpt2Shape, seed: int = 0, dtype: str = "float32") -> None:
    """A GPT-2 (Conv1D as [in, out]); `dtype`, float32 or bfloat16, is that of all tensors."""
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "n_embd": shape.hidden_size, "n_layer": shape.num_layers, "n_head": shape.num_heads,
        "n_positions": shape.max_positions, "n_ctx": shape.max_positions, "vocab_size": shape.vocab_size,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "dtype": dtype,
    }  # fmt: skip
    write_random_folder(folder, config, seed)


def write_qwen3_folder(folder: Path, config: Mapping[str, Any] = PRESETS["qwen3-0.6b"], seed: int = 0) -> None:
    """A Qwen3, in bfloat16."""
    write_random_folder(folder, {**config, "dtype": "bfloat16"}, seed)


def write_random_folder(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Writes config.json and generation_config.json, with the last id as the end of sequence, and model.safetensors
    with the tensors that the model declares."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), config["vocab_size"] - 1)
    for name, content in (("config.json", {**ends, **config}), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    declared = declare(folder, load_format="dummy", device="cpu")
    generator = np.random.default_rng(seed)
    residual = float((2 * declared.config.num_layers) ** -0.5)
    element = np.dtype(ml_dtypes.bfloat16 if config["dtype"] == "bfloat16" else np.float32)
    tensors = {}
    for name, stored in declared.source.tensors.items():
        shape = stored.shape
        values = generator.standard_normal(shape, dtype=np.float32)
        is_residual = name.endswith(("c_proj.weight", "o_proj.weight", "down_proj.weight"))
        values *= np.float32(0.02 * (residual if is_residual else 1.0))
        if len(shape) == 1 and name.endswith(".weight"):  # a norm
            values += np.float32(1.0)
        tensors[name] = values.astype(element)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


GPT2, QWEN3 = "gpt2-124m", "qwen3-0.6b"
DTYPES = ("float32", "bfloat16", "int8")
GGUF = "gguf"
"""The type of a file's weights, whichever they are."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_prompts` prompts of `prompt_len` tokens, `new_tokens` each; `measure` is the metric.

    measure: "decode" (tokens after the first, per second), "prefill" (prompt tokens per second until the first
    new token) or "burst" (all new tokens per second of the whole). `key` is its name on the command line.
    `is_also_sequential`: ours is also measured with one request after another.
    """

    key: str
    name: str
    num_prompts: int
    prompt_len: int
    new_tokens: int
    measure: str
    model: str = GPT2
    dtypes: tuple[str, ...] = DTYPES
    is_also_sequential: bool = False

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_len + self.new_tokens


WORKLOADS = (
    Workload("decode-1", "decode, batch 1", 1, 16, 33, "decode"),
    Workload("prefill", "prefill 512", 1, 512, 1, "prefill"),
    Workload("decode-8", "decode, batch 8", 8, 16, 17, "decode"),
    Workload("decode-32", "decode, batch 32", 32, 16, 17, "decode"),
    Workload("burst", "burst, 32 x (4 + 8)", 32, 4, 8, "burst"),
    Workload("qwen3-decode-1", "Qwen3-0.6B, decode, batch 1", 1, 16, 17, "decode", QWEN3, ("bfloat16",)),
    Workload("concurrent-8", "8 x (32 + 32) at once", 8, 32, 32, "burst", dtypes=("float32",), is_also_sequential=True),
)
ON_REQUEST = ("concurrent-8",)
"""Workloads that only run when they are named."""

GGUF_WORKLOADS = ("decode-1", "prefill", "decode-8", "decode-32", "burst")
"""Those that run on a GGUF file."""

HOST_WORK = ("load", "pack", "tokenizer")
"""Workloads without a token rate: loading a file, packing weights, the tokenizer."""


@dataclass(frozen=True, slots=True)
class Group:
    """A model in one type of weights: its workloads share a folder and the processes that have loaded it.

    On disk the weights are float32, or bfloat16 if `dtype` is bfloat16; int8 is made from them while loading.
    With `gguf` they are that file's, and `dtype` is GGUF.
    """

    model: str
    dtype: str
    workloads: tuple[Workload, ...]
    gguf: Path | None = None

    @property
    def stored_dtype(self) -> str:
        """The type that the engine loads the tensors in."""
        return {"int8": "float32", GGUF: "auto"}.get(self.dtype, self.dtype)

    def write(self, folder: Path, shape: Gpt2Shape, seed: int) -> None:
        """Writes the model's folder; `shape` is that of GPT-2."""
        if self.gguf is not None:
            return
        if self.model == GPT2:
            write_gpt2_folder(folder, shape, seed, self.stored_dtype)
        else:
            write_qwen3_folder(folder, seed=seed)


def named(option: str, given: str | None, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """Those of `known` in comma-separated words, in `known`'s order, or `default` without any words.

    Raises `BenchmarkError` with the unknown word.
    """
    if given is None:
        return tuple(default)
    wanted = {word.strip() for word in given.split(",")}
    if unknown := wanted - set(known):
        raise BenchmarkError(f"{option}: {', '.join(sorted(unknown))!r} is none of {', '.join(known)}")
    return tuple(word for word in known if word in wanted)


def gguf_groups(files: Sequence[Path], keys: Sequence[str]) -> list[Group]:
    """The given workloads that run on a GGUF file, for each file; the model is its name."""
    found = []
    for file in files:
        if not file.is_file():
            raise BenchmarkError(f"--gguf: {file} is no file")
        chosen = [each for each in WORKLOADS if each.key in keys and each.key in GGUF_WORKLOADS]
        workloads = tuple(replace(each, model=file.stem, dtypes=(GGUF,)) for each in chosen)
        found.append(Group(file.stem, GGUF, workloads, file))
    return found


def groups_of(workloads: Sequence[Workload], dtypes: Sequence[str]) -> list[Group]:
    """The workloads by model and type, each group's in the table's order."""
    found = []
    for model in dict.fromkeys(workload.model for workload in workloads):
        for dtype in dtypes:
            chosen = tuple(each for each in workloads if each.model == model and dtype in each.dtypes)
            if chosen:
                found.append(Group(model, dtype, chosen))
    return found
