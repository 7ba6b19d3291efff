"""Reads a LoRA adapter in a GGUF file, as llama.cpp's `convert_lora_to_gguf.py` writes it.

Each adapted tensor of the model has two, whose names end with ".lora_a" `[r, inputs]` and ".lora_b" `[outputs, r]`;
those of a layer's experts are stacked, and the token table's lora_a is `[rows, r]`. The scale is `adapter.lora.alpha`
over the rank; with an alpha of 0, as in older files, nothing is scaled, as in llama.cpp. Rows of heads that the
converter has moved are moved back, so that an adapter fits the model in any file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from models.adapter_modules import MERGE
from models.gguf.architectures import ARCHITECTURES, GgufArchitecture
from models.gguf.formats import Array
from models.gguf.model_file import PERMUTED, name_in_checkpoint, part_of
from models.gguf.reader import MAGIC, GgufFile
from models.gguf.weights import in_halves
from models.peft import PeftAdapter
from runtime.linear.adapter_pairs import Pair

_TABLE = "token_embd"
_MOVED = ("ssm_", "linear_attn", "attn_k_b", "attn_v_b", "attn_kv_b", "shortconv")
"""Parts of which the converter moves rows or columns in other ways."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins with GGUF's magic bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:  # a folder, or whatever PEFT's reader says of it
        return False


def rank_of(path: Path) -> int:
    """The largest rank of an adapter's file. Raises `WeightsError`."""
    file, _ = _opened(path)
    return max(entry.shape[-1] for name, entry in file.tensors.items() if name.endswith(".lora_b"))


def read_gguf_adapter(path: Path, head_dim: int) -> PeftAdapter:
    """The adapter in a file, scaled, float32, by the names that modules have in safetensors; `head_dim` is that of the
    model's heads. Raises `WeightsError`, naming file, key or tensor, and what to do."""
    file, rules = _opened(path)
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise file.error(f"adapter.lora.alpha is {alpha!r:.80}, must be a finite number")
    digest = hashlib.sha256(f"{file.metadata['general.architecture']} {float(alpha)!r}".encode())
    pairs: dict[str, Pair] = {}
    for stem in sorted({name.removesuffix(".lora_a").removesuffix(".lora_b") for name in file.tensors}):
        halves = []
        for end in (".lora_a", ".lora_b"):
            if (name := stem + end) not in file.tensors:
                raise file.error(f"tensor {name!r:.200} is missing" if _has_pair(file, stem) else _reason(stem))
            entry = file.tensors[name]
            digest.update(f"{name} {entry.format.name} {entry.shape}".encode())
            digest.update(np.ascontiguousarray(file.raw(name)).data)
            halves.append(np.asarray(file.array(name), np.float32))
            if not np.isfinite(halves[-1]).all():
                raise file.error(f"tensor {name!r:.200} holds NaN or infinity: the adapter is broken")
        down, up = halves
        if stem == f"{_TABLE}.weight":
            down = down.T
        if not (down.ndim == up.ndim in (2, 3) and down.shape[-2] == up.shape[-1]):
            raise file.error(
                f"{stem} has lora_a {list(down.shape)} and lora_b {list(up.shape)}, must be [r, inputs] and"
                " [outputs, r]"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            up = up * np.float32(alpha / down.shape[-2] if alpha else 1.0)
        if not np.isfinite(up).all():
            raise file.error(f"{stem} holds infinity once scaled by {alpha / down.shape[-2]:g}: the adapter is broken")
        pairs.update(_by_module(file, stem, rules, head_dim, down, up))
    return PeftAdapter(digest.hexdigest(), pairs)


def _has_pair(file: GgufFile, stem: str) -> bool:
    return f"{stem}.lora_a" in file.tensors or f"{stem}.lora_b" in file.tensors


def _reason(stem: str) -> str:
    return f"tensor {stem!r:.200} is no part of a LoRA pair, which cannot be served as an adapter: {MERGE}"


def _opened(path: Path) -> tuple[GgufFile, GgufArchitecture]:
    file = GgufFile(path)
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        found = file.metadata.get(key, "model" if key == "general.type" else None)
        if found != wanted:
            raise file.error(f"{key} is {found!r:.80}, must be {wanted!r}: give the file of an adapter")
    if (tokens := file.metadata.get("adapter.alora.invocation_tokens")) is not None and np.size(tokens):  # type: ignore[arg-type]
        raise file.error(
            f"adapter.alora.invocation_tokens is not empty: activated LoRA cannot be served as an adapter; {MERGE}"
        )
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise file.error(
            f"general.architecture {name!r:.80} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if not any(each.endswith(".lora_b") for each in file.tensors):
        raise file.error("holds no pair lora_a, lora_b")
    return file, ARCHITECTURES[name]


def _by_module(
    file: GgufFile, stem: str, rules: GgufArchitecture, head_dim: int, down: Array, up: Array
) -> Iterator[tuple[str, Pair]]:
    """The pairs of one tensor of the model."""
    part, name = part_of(stem), name_in_checkpoint(stem, rules)
    module = name.removesuffix(".weight")
    if module == name or name == stem:
        raise file.error(f"{stem!r:.200} is no map of {file.metadata['general.architecture']}: {MERGE}")
    if part in rules.transposed or part in rules.convolutions or any(each in f"{part} {module}" for each in _MOVED):
        raise file.error(f"{stem!r:.200} is a map that the converter rearranges: give the adapter as PEFT's folder")
    if "{expert}" not in module:
        if up.ndim == 3:
            raise file.error(f"{stem!r:.200} is a stack of {len(up)}, but no map of experts")
        if rules.has_permuted_heads and part in PERMUTED:
            if part == "attn_qkv" or len(up) % head_dim:
                raise file.error(
                    f"{stem!r:.200} has {len(up)} outputs, no whole heads of {head_dim}: the adapter is for another"
                    " model"
                )
            up = in_halves(up, head_dim)
        yield module, Pair(down, up)
        return
    if up.ndim != 3 or len(up) != len(down):
        raise file.error(
            f"{stem!r:.200} is no stack of all experts: lora_a {list(down.shape)}, lora_b {list(up.shape)}"
        )
    for expert, (inner, outer) in enumerate(zip(down, up, strict=True)):
        yield module.format(expert=expert), Pair(inner, outer)
