"""Adapters in GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them, beside PEFT's logits; wrong files.

`tools/references/llama_logits.py` gives llama.cpp's own logits with such a file: within 1e-6 of ours in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from models.adapter_changes import changes_of, largest_rank_and_base, read_changes
from models.errors import ModelLoadError
from models.gguf.adapter import is_gguf
from models.peft import PeftAdapter
from models.registry import declare, load_model
from runtime.linear.adapter_pairs import Pair
from runtime.linear.low_rank import LowRankMaps
from runtime.linear.options import LoadOptions
from tests.models.adapter_cases import CASES, adapter_tensor, load_adapter_golden
from tests.models.driver import Array, relative_error
from tests.models.folders import golden_tensors, write_model
from tests.models.gguf.files import ARCHITECTURES, PERMUTED, write_gguf
from tests.models.gguf.test_model import CONFIG, quantised_tensors
from tests.models.test_adapters import logits_of

Metadata = Callable[[gguf.GGUFWriter], None]
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def add_usual(writer: gguf.GGUFWriter, alpha: float = 12.0) -> None:
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)


def written(
    path: Path, architecture: str, tensors: dict[str, Array], ggml: Ggml = Ggml.F32, add: Metadata = add_usual
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    add(writer)
    for name, array in tensors.items():
        stored = np.ascontiguousarray(array)
        if ggml == Ggml.Q8_0 and stored.shape[-1] % 32:
            writer.add_tensor(name, stored.astype(np.float16))  # as the converter does
        elif ggml in (Ggml.F32, Ggml.F16):
            writer.add_tensor(name, stored.astype(np.float32 if ggml == Ggml.F32 else np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(stored, ggml), raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(case: str) -> tuple[str, dict[str, Array]]:
    """The architecture, and a case's tensors by their names in GGUF: of queries and keys in llama.cpp's order."""
    golden = load_adapter_golden(case)
    config = json.loads((golden.golden.folder / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    found = {}
    for name, shape in golden.shapes.items():
        if ".base_layer" in name:
            continue
        module, _, end = name.removeprefix("base_model.model.").partition(".lora_")
        half = "a" if "A" in end else "b"
        array = adapter_tensor(name, shape, case)
        leaf = module.rpartition(".")[2]
        if half == "b" and kind in PERMUTED and leaf in HEADS:
            pairs = array.reshape(config[HEADS[leaf]], 2, -1, array.shape[1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        stored = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        assert stored is not None
        found[f"{stored}.lora_{half}"] = array.T if stored.startswith("token_embd") and half == "a" else array
    return ARCHITECTURES[kind], found


def loaded(folder: Path, path: Path, rank: int = 8) -> Any:
    """A model with the adapter in its second slot."""
    maps = LowRankMaps(2, rank)
    model = load_model(folder, addends=maps, dtype="float32")
    maps.allocate(LoadOptions(dtype=model.dtype))
    changes = read_changes(path, maps, model, lambda: declare(folder, dtype="float32").source).pairs
    maps.check(changes)
    maps.write(1, changes)
    return model


@pytest.mark.parametrize(("case", "is_file"), [
    ("llama", False), ("llama", True), ("phi3", False), ("phi3", True), ("gemma3", False), ("qwen3_moe", True),
    ("tables", False), ("tables", True),
])  # fmt: skip
def test_rows_are_as_pefts(tmp_path: Path, case: str, is_file: bool) -> None:
    golden = load_adapter_golden(case)
    folder = write_model(tmp_path / "model", golden.golden)
    if is_file:
        config = json.loads((golden.golden.folder / "config.json").read_text(encoding="utf-8"))
        folder = write_gguf(tmp_path / "model.gguf", config, golden_tensors(golden.golden))
    path = written(tmp_path / "adapter.gguf", *converted(case))
    assert is_gguf(path)
    assert largest_rank_and_base(path) == (CASES[case].r, "")
    own, without = logits_of(loaded(folder, path), golden.golden.prompt_ids, [1, -1], 3)
    assert relative_error(own, golden.logits) <= 2e-5
    assert relative_error(without, golden.golden.logits["float32"]) <= 2e-5


@pytest.mark.parametrize(("ggml", "allowed"), [(Ggml.F16, 1e-3), (Ggml.BF16, 1e-2), (Ggml.Q8_0, 2e-2)])
def test_other_types_are_read(tmp_path: Path, ggml: Ggml, allowed: float) -> None:
    golden = load_adapter_golden("llama_bias")  # of widths that blocks divide, or not
    rng, folder = np.random.default_rng(0), write_model(tmp_path / "model", golden.golden)
    width, rank = golden.golden.shapes["model.layers.0.mlp.up_proj.weight"][1], 32
    outputs = golden.golden.shapes["model.layers.0.mlp.up_proj.weight"][0]
    pair = {
        "blk.0.ffn_up.weight.lora_a": rng.standard_normal((rank, width)).astype(np.float32) / 8,
        "blk.0.ffn_up.weight.lora_b": rng.standard_normal((outputs, rank)).astype(np.float32) / 8,
    }
    rows = [
        logits_of(loaded(folder, written(tmp_path / f"{kind.name}.gguf", "llama", pair, kind), rank),
                  golden.golden.prompt_ids, [1], 3)[0]
        for kind in (Ggml.F32, ggml)
    ]  # fmt: skip
    assert 0 < relative_error(rows[1], rows[0]) <= allowed


def test_pairs_are_rounded_only_where_every_part_of_a_map_rounds_x(tmp_path: Path) -> None:
    blocks, floats = quantised_tensors(lambda name: Ggml.Q8_0)
    for name in (name for name in blocks if "k_proj" in name):
        blocks[name] = floats[name]
    types = lambda name: Ggml.F32 if "attn_k" in name else Ggml.Q8_0  # noqa: E731
    path, maps = write_gguf(tmp_path / "model.gguf", CONFIG, blocks, type_of=types), LowRankMaps(1, 8)
    load_model(path, addends=maps)
    rounds = {name.rpartition(".")[2]: each.rounds_x for name, each in maps.maps.items()}
    assert rounds == {"q_proj": False, "o_proj": True, "gate_proj": True, "down_proj": True}


def test_stacks_are_the_pairs_of_each_expert(tmp_path: Path) -> None:
    golden = load_adapter_golden("qwen3_moe_experts")
    folder, maps = write_model(tmp_path / "model", golden.golden), LowRankMaps(1, 2)
    model = load_model(folder, addends=maps, dtype="float32")
    count, rng = model.config.rule.num_experts, np.random.default_rng(0)
    hidden, inner = model.config.hidden_size, model.config.expert_size
    layer = next(i for i in range(model.config.num_layers) if i not in model.config.dense_layers)
    down, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((count, 2, inner), (count, hidden, 2)))
    names = [f"blk.{layer}.ffn_down_exps.weight.lora_{half}" for half in "ab"]
    path = written(tmp_path / "experts.gguf", "qwen3moe", dict(zip(names, (down, up))))
    found = read_changes(path, maps, model, lambda: declare(folder).source)
    pairs = {
        f"model.layers.{layer}.mlp.experts.{each}.down_proj": Pair(down[each], up[each] * np.float32(6))
        for each in range(count)
    }
    expected = changes_of(PeftAdapter("", pairs), maps, model, lambda: declare(folder).source)
    assert found.pairs.keys() == expected.pairs.keys()
    for module, change in found.pairs.items():
        for ours, theirs in zip(change, expected.pairs[module], strict=True):
            assert (ours is None and theirs is None) or np.array_equal(ours, theirs)


def _with_tokens(writer: gguf.GGUFWriter) -> None:
    add_usual(writer)
    writer.add_array("adapter.alora.invocation_tokens", [1, 2])


def _other_kind(writer: gguf.GGUFWriter) -> None:
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "control")


_A, _B = "blk.0.ffn_up.weight.lora_a", "blk.0.ffn_up.weight.lora_b"


@pytest.mark.parametrize(
    ("tensors", "add", "message"),
    [
        ({}, _with_tokens,
         "alora.invocation_tokens is not empty: activated LoRA cannot be served as an adapter; merge"),
        ({}, _other_kind, "adapter.type is 'control', must be 'lora'"),
        ({}, lambda writer: None, "general.type is 'model', must be 'adapter'"),
        ({_A: np.full((2, 33), np.nan)}, add_usual, "lora_a' holds NaN or infinity: the adapter is broken"),
        ({_A: ...}, add_usual, "lora_a' is missing"),
        ({_B: np.ones((5, 3))}, add_usual, r"lora_a \[2, 33\] and lora_b \[5, 3\], must be"),
        ({_A: np.ones((2, 9))}, add_usual, "the adapter is for another model"),
        ({"blk.0.attn_norm.weight": np.ones(33)}, add_usual, "attn_norm.weight' is no part of a LoRA pair"),
        ({"blk.0.what.weight.lora_a": np.ones((2, 33)), "blk.0.what.weight.lora_b": np.ones((5, 2))}, add_usual,
         "'blk.0.what.weight' is no map of llama"),
        ({}, lambda writer: add_usual(writer, float("nan")), "adapter.lora.alpha is nan, must be a finite number"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused_in_one_line(
    tmp_path: Path, tensors: dict[str, Any], add: Metadata, message: str
) -> None:
    golden = load_adapter_golden("llama")
    folder, maps = write_model(tmp_path / "model", golden.golden), LowRankMaps(1, 8)
    model = load_model(folder, addends=maps)
    outputs = golden.golden.shapes["model.layers.0.mlp.up_proj.weight"][0]
    given = {_A: np.ones((2, 33), np.float32), _B: np.ones((outputs, 2), np.float32), **tensors}
    given = {name: array.astype(np.float32) for name, array in given.items() if array is not ...}
    path = written(tmp_path / "adapter.gguf", "llama", given, add=add)
    with pytest.raises((ModelLoadError, ValueError), match=message) as caught:
        maps.check(read_changes(path, maps, model, lambda: declare(folder).source).pairs)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    golden = load_adapter_golden("llama")
    folder, maps = write_model(tmp_path / "model", golden.golden), LowRankMaps(1, 8)
    model = load_model(folder, addends=maps)
    (tmp_path / "adapter.gguf").write_bytes(b"PK\3\4" * 9)
    with pytest.raises(ModelLoadError, match="is a file, but no GGUF; an adapter is a folder"):
        read_changes(tmp_path / "adapter.gguf", maps, model, lambda: declare(folder).source)
    for size in (3, 24, 90):
        whole = written(tmp_path / "whole.gguf", *converted("llama")).read_bytes()
        (tmp_path / "cut.gguf").write_bytes(b"GGUF" + whole[4:size])
        with pytest.raises(ModelLoadError) as caught:
            read_changes(tmp_path / "cut.gguf", maps, model, lambda: declare(folder).source)
        assert "\n" not in str(caught.value)
