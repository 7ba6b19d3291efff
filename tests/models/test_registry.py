"""`load_model`: types, dummy weights, memory, and a bad folder of every kind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import models.families
from models.checkpoints.checkpoint import TensorLayout
from models.checkpoints.dummy import dummy_checkpoint
from models.errors import ConfigError, ModelLoadError, WeightsError
from models.families.gpt2 import GPT2Model
from models.families.llama import LlamaModel
from models.registry import declare_model, load_config, load_model, tensor_layout
from runtime.device.device import Device
from runtime.dtype import bfloat16, float16, float32
from runtime.errors import DeviceError, InvalidArgumentError
from runtime.kv.forms import KeyValues
from runtime.ops import LinearWeight
from tests.models.driver import logits_of, relative_error
from tests.models.folders import (
    Golden,
    change_config,
    golden_tensors,
    load_golden,
    write_model,
    write_safetensors,
    write_shards,
)
from tests.models.products import compared_products

ROOT = Path(models.families.__file__).parents[2]
LLAMA = load_golden("llama_default")
TIED = load_golden("llama_tied_gqa4")
GPT2 = load_golden("gpt2_gelu_erf")
GPT_NEOX = load_golden("gpt_neox_odd")
IDS = [5, 1, 60, 2, 2, 33]


def test_the_package_hands_on_its_names() -> None:
    for name in models.__all__:
        assert getattr(models, name).__name__ == name
    with pytest.raises(ImportError, match="nothing"):
        from models import nothing  # noqa: F401


def test_what_a_loaded_model_says_of_itself(tmp_path: Path) -> None:
    model = load_model(str(write_model(tmp_path, LLAMA, "BF16")))
    assert isinstance(model, LlamaModel)
    assert model.config.num_layers == 2
    assert model.dtype is bfloat16
    assert model.device == Device("cpu")
    assert model.max_positions == 128
    spec = model.kv_cache_spec(32)
    assert (spec.num_layers, spec.of_layer(1).form) == (2, KeyValues(3, 16))
    assert (spec.block_size, spec.dtype) == (32, bfloat16)
    assert model.kv_cache_spec(16, float32).dtype is float32
    assert isinstance(load_model(write_model(tmp_path / "gpt2", GPT2)), GPT2Model)


@pytest.mark.parametrize("stored_as", ["F32", "BF16"])
def test_a_tied_table_is_kept_once(tmp_path: Path, stored_as: str) -> None:
    tied = load_model(write_model(tmp_path, TIED, stored_as))
    assert isinstance(tied, LlamaModel)
    assert isinstance(tied.embed_tokens, LinearWeight)
    assert tied.embed_tokens is tied.lm_head.weight

    tensors = golden_tensors(TIED, stored_as)
    tensors["lm_head.weight"] = table = tensors["model.embed_tokens.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert load_model(tmp_path).weight_bytes == tied.weight_bytes
    change_config(tmp_path, tie_word_embeddings=False)
    assert load_model(tmp_path).weight_bytes == tied.weight_bytes + table.nbytes


def test_the_files_head_counts_where_the_config_says_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another head than the embedding is not tied, as in transformers, whatever the flag says; without a stored one
    there is nothing but the embedding."""
    tensors = golden_tensors(TIED)

    def loaded(name: str, is_tied: bool, head: np.ndarray[Any, Any] | None) -> Any:
        folder = write_model(tmp_path / name, TIED)
        change_config(folder, tie_word_embeddings=is_tied)
        stored = {**tensors, **({} if head is None else {"lm_head.weight": head})}
        write_safetensors(folder / "model.safetensors", stored)
        caplog.clear()
        model, declared = load_model(folder), declare_model(folder)
        assert declared.weight_bytes == model.weight_bytes
        return model

    other = tensors["model.embed_tokens.weight"][::-1].copy()
    untied = loaded("untied", False, other)
    assert not caplog.messages
    for name, flag, head, same, said in (
        ("other", True, other, untied, "an output head that differs from the embedding: the head is the stored one"),
        ("absent", False, None, loaded("tied", True, None), "no output head: the head is the embedding"),
    ):
        model = loaded(name, flag, head)
        assert [said in message for message in caplog.messages] == [True]
        assert model.weight_bytes == same.weight_bytes
        np.testing.assert_array_equal(logits_of(model, IDS), logits_of(same, IDS))


@pytest.mark.parametrize(
    ("golden", "name"),
    [(LLAMA, "LlamaModel"), (GPT2, "GPT2Model"), (GPT_NEOX, "GPTNeoXModel")],
    ids=["llama", "gpt2", "gpt_neox"],
)
def test_a_model_that_was_saved_without_its_head(tmp_path: Path, golden: Golden, name: str) -> None:
    """As `LlamaModel.save_pretrained` writes it: no head, names without their beginning. The embedding is the head."""
    folder = write_model(tmp_path / "bare", golden)
    heads, prefix = ("lm_head.weight", "embed_out.weight"), re.compile(r"^(model|transformer|gpt_neox)\.")
    whole = {key: array for key, array in golden_tensors(golden).items() if key not in heads}
    bare = {prefix.sub("", key): array for key, array in whole.items()}
    write_safetensors(folder / "model.safetensors", bare)
    change_config(folder, architectures=[name])
    tied = write_model(tmp_path / "tied", golden)
    write_safetensors(tied / "model.safetensors", whole)
    change_config(tied, tie_word_embeddings=True)
    np.testing.assert_array_equal(logits_of(load_model(folder), IDS), logits_of(load_model(tied), IDS))


def test_modernberts_decoder_without_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is more than the embedding: without it, it has hidden states alone."""
    golden = load_golden("modernbert_decoder_odd")
    whole, folder = load_model(write_model(tmp_path / "whole", golden)), write_model(tmp_path / "bare", golden)
    bare = {
        key.removeprefix("model."): array
        for key, array in golden_tensors(golden).items()
        if not key.startswith(("lm_head.", "decoder."))
    }
    write_safetensors(folder / "model.safetensors", bare)
    change_config(folder, architectures=["ModernBertDecoderModel"])
    model, ids = load_model(folder), golden.prompt_ids
    with pytest.raises(InvalidArgumentError, match="ModernBertDecoderModel has no logits"):
        logits_of(model, ids)
    assert not model.generates
    monkeypatch.setattr(model, "compute_logits", whole.compute_logits)
    np.testing.assert_array_equal(logits_of(model, ids), logits_of(whole, ids))


def test_each_dtype_halves_or_doubles_the_bytes(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    sizes = {dtype: load_model(tmp_path, dtype=dtype).weight_bytes for dtype in ("auto", "float32", "bf16", "float16")}
    assert sizes["auto"] == sizes["float32"]
    assert sizes["bf16"] == sizes["float16"]
    assert 0.5 <= sizes["bf16"] / sizes["float32"] < 0.55  # norms stay float32


def test_parts_of_one_map_may_be_stored_in_different_types(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA, "BF16")
    uniform = logits_of(load_model(tmp_path, dtype="float32"), IDS)
    tensors = golden_tensors(LLAMA, "BF16")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors[name] = tensors[name].astype(np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    mixed = load_model(tmp_path)
    assert mixed.dtype is bfloat16
    with compared_products() as errors:
        assert relative_error(logits_of(mixed, IDS, kv_dtype=float32), uniform) <= 1e-5
    assert max(errors) <= 1e-5


def test_a_number_that_float16_cannot_hold(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    tensors = golden_tensors(LLAMA)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = -7e4
    write_safetensors(tmp_path / "model.safetensors", tensors)
    load_model(tmp_path, dtype="bfloat16")
    with pytest.raises(WeightsError, match=r"'model.layers.1.mlp.down_proj.weight': 70000 is more than float16 holds"):
        load_model(tmp_path, dtype="float16")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to see the mappings")
@pytest.mark.parametrize("golden", [LLAMA, TIED, GPT2])
def test_the_mapping_is_released_after_loading(tmp_path: Path, golden: Any) -> None:
    folder = write_model(tmp_path, golden)
    model = load_model(folder)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    (folder / "model.safetensors").write_bytes(b"")  # nothing reads it any more
    assert np.isfinite(logits_of(model, IDS)).all()


LOAD_AND_MEASURE = """
import json, sys
from models.registry import load_model

def kilobytes(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

before = kilobytes("VmRSS:")
model = load_model(sys.argv[1])
print(json.dumps([model.weight_bytes, (kilobytes("VmHWM:") - before) * 1024]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see the memory in use")
def test_loading_takes_little_more_memory_than_one_copy(tmp_path: Path) -> None:
    fields = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 1000}
    load_model(write_model(tmp_path, LLAMA))  # compiles what the other process finds: that memory is not loading's
    change_config(tmp_path, **fields, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    config = load_config(tmp_path)
    header, position = {}, 0
    for name, shape in tensor_layout(config).shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # as files have it: what lies at odd addresses is copied first
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)  # all zeros, and none on the disk
    arguments = [sys.executable, "-c", LOAD_AND_MEASURE, str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    weight_bytes, peak_bytes = json.loads(done.stdout)
    assert weight_bytes > 128 << 20
    assert peak_bytes < 1.35 * weight_bytes


def test_position_tables_end_at_the_wanted_length(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA)
    short, whole = load_model(folder, max_model_len=40), load_model(folder)
    assert isinstance(short, LlamaModel)
    assert short.rope_of(0).cos.shape == (40, 8)
    assert short.max_positions == 40
    np.testing.assert_array_equal(logits_of(short, IDS), logits_of(whole, IDS))


def test_a_position_table_beyond_memory_is_refused_with_its_size(tmp_path: Path) -> None:
    folder = change_config(write_model(tmp_path, LLAMA), max_position_embeddings=10**9)
    with pytest.raises(ModelLoadError, match=r"1,000,000,000 positions takes 64,000,000,000 bytes.* max_model_len"):
        load_model(folder)
    model = load_model(folder, max_model_len=40)
    assert isinstance(model, LlamaModel)
    assert model.rope_of(0).cos.shape == (40, 8)


# ---------------------------------------------------------------- dummy weights


@pytest.mark.parametrize("golden", [LLAMA, TIED, GPT2], ids=lambda golden: golden.name)
def test_dummy_weights_need_a_config_only(tmp_path: Path, golden: Any) -> None:
    folder = write_model(tmp_path, golden)
    (folder / "model.safetensors").unlink()
    first, again, other = (load_model(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    logits = logits_of(first, IDS)
    assert np.isfinite(logits).all()
    assert logits.std() > 1e-3
    np.testing.assert_array_equal(logits, logits_of(again, IDS))
    assert relative_error(logits_of(other, IDS), logits) > 0.1


@pytest.mark.parametrize(
    ("in_config", "wanted", "dtype"),
    [(None, "auto", float32), ("bfloat16", "auto", bfloat16), ("bfloat16", "float16", float16)],
)
def test_the_type_of_dummy_weights(tmp_path: Path, in_config: str | None, wanted: str, dtype: Any) -> None:
    change_config(write_model(tmp_path, LLAMA), dtype=in_config)
    model = load_model(tmp_path, load_format="dummy", dtype=wanted)
    assert model.dtype is dtype
    assert model.lm_head.format.element is dtype


def test_dummy_tensors_are_of_the_right_spread_and_each_its_own() -> None:
    shapes = {"a.weight": (400, 500), "b.weight": (400, 500), "norm.weight": (500,), "a.bias": (400,)}
    layout = TensorLayout(shapes, "x.", harmless=re.compile("never"))
    source = dummy_checkpoint(layout, 3, bfloat16)
    a, b = (source[name].array() for name in ("a.weight", "b.weight"))
    assert a.dtype == ml_dtypes.bfloat16
    assert a.shape == (400, 500)
    assert abs(a.astype(np.float32).std() - 0.02) < 2e-4
    assert abs(a.astype(np.float32).mean()) < 2e-4
    assert abs(np.corrcoef(a.astype(np.float32).ravel(), b.astype(np.float32).ravel())[0, 1]) < 0.01
    assert (source["norm.weight"].array() == 1).all()
    assert (source["a.bias"].array() == 0).all()


# ---------------------------------------------------------------- wrong arguments and wrong folders


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"dtype": "int8"},
            InvalidArgumentError,
            "dtype must be auto, float32, float16 or bfloat16, not 'int8'",
        ),
        ({"dtype": "fp12"}, InvalidArgumentError, "dtype 'fp12' is not one of"),
        (
            {"load_format": "pt"},
            InvalidArgumentError,
            "load_format must be auto, safetensors or dummy, not 'pt'",
        ),
        ({"device": "cuda:0"}, DeviceError, "no CUDA driver"),
        ({"max_model_len": 129}, InvalidArgumentError, "max_model_len must be from 1 to 128 .* not 129"),
        ({"max_model_len": 0}, InvalidArgumentError, "max_model_len must be from 1 to 128"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_model(write_model(tmp_path, LLAMA), **arguments)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lose_a_shard(folder: Path) -> None:
    tensors = golden_tensors(LLAMA)
    (folder / "model.safetensors").unlink()
    norm = {"model.norm.weight": tensors.pop("model.norm.weight")}
    write_shards(folder, {"model-1.safetensors": tensors, "model-2.safetensors": norm})
    (folder / "model-2.safetensors").unlink()


def rewrite(folder: Path, **changes: Any) -> None:
    tensors = golden_tensors(LLAMA)
    for name, change in changes.items():
        tensors[name.replace("__", ".")] = change
    write_safetensors(folder / "model.safetensors", tensors)


BAD_FOLDERS: list[tuple[str, Callable[[Path], Any], type[ModelLoadError], str]] = [
    ("no_config", lambda f: (f / "config.json").unlink(), ConfigError, "config.json: the file is missing"),
    ("not_json", lambda f: (f / "config.json").write_text("{'a': 1}"), ConfigError, "config.json: not JSON"),
    (
        "missing_key",
        lambda f: change_config(f, vocab_size=None),
        ConfigError,
        "config.json: vocab_size is missing",
    ),
    (
        "unknown_architecture",
        lambda f: change_config(f, architectures=["BloomForCausalLM"], model_type="bloom"),
        ConfigError,
        r"config.json: architectures 'BloomForCausalLM' is not supported\. .* Supported are .*LlamaForCausalLM, ",
    ),
    ("truncated", truncate, WeightsError, "model.safetensors: tensor .* the file is truncated"),
    (
        "no_weights",
        lambda f: (f / "model.safetensors").unlink(),
        ModelLoadError,
        "has neither model.safetensors",
    ),
    ("missing_shard", lose_a_shard, WeightsError, "model-2.safetensors: the file is missing"),
    (
        "wrong_shape",
        lambda f: rewrite(f, model__norm__weight=np.ones(47, np.float32)),
        WeightsError,
        r"model.safetensors: tensor 'model.norm.weight' is \[47\], but the config asks for \[48\]",
    ),
    (
        "wrong_type",
        lambda f: rewrite(f, model__norm__weight=np.ones(48, np.int64)),
        WeightsError,
        "tensor 'model.norm.weight' is I64, not F32, F16 or BF16",
    ),
    (
        "left_over",
        lambda f: rewrite(f, model__layers__0__mlp__router__weight=np.ones(48, np.float32)),
        WeightsError,
        "tensor 'model.layers.0.mlp.router.weight' is left over",
    ),
    ("other_vocabulary", lambda f: change_config(f, vocab_size=96), WeightsError, "config asks for .96, 48."),
    (
        "other_family",
        lambda f: change_config(f, architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
        WeightsError,
        "tensor 'model.layers.0.self_attn.q_norm.weight' .* is missing",
    ),
]


@pytest.mark.parametrize(("name", "spoil", "error", "message"), BAD_FOLDERS, ids=[bad[0] for bad in BAD_FOLDERS])
def test_a_bad_folder(
    tmp_path: Path, name: str, spoil: Callable[[Path], Any], error: type[ModelLoadError], message: str
) -> None:
    folder = write_model(tmp_path / name, LLAMA)
    load_model(folder)
    spoil(folder)
    with pytest.raises(error, match=message) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)


def test_what_compiles_ahead_wakes_neither_numba_nor_the_hub() -> None:
    code = (
        "import json, sys; from models.configuration.config import load_dtype;"
        "from models.configuration.generation_config import load_generation_config;"
        "from models.checkpoints.hub import resolve_model;"
        "folder = resolve_model(None); load_dtype(folder); load_generation_config(folder);"
        "print(json.dumps([name in sys.modules for name in ('numba', 'runtime.ops', 'huggingface_hub')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False, False]


def test_a_model_on_the_cpu_does_not_wait_for_numba_cuda() -> None:
    code = (
        "import sys; import runtime.llm; from models.checkpoints.hub import resolve_model;"
        "from models.registry import load_model; load_model(resolve_model(None));"
        "print([name for name in sys.modules if name.startswith(('numba.cuda', 'numba_cuda', 'cuda'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
