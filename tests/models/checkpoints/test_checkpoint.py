"""A folder's weights against its config: every offender named, harmless extras accepted, shards checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.model_files import open_model
from models.checkpoints.weight_files import open_checkpoint
from models.errors import ConfigError, ModelLoadError, WeightsError
from models.registry import load_config, tensor_layout
from runtime.dtype import bfloat16, float32
from tests.models.folders import (
    CASES,
    Array,
    change_config,
    golden_tensors,
    load_golden,
    write_model,
    write_safetensors,
    write_shards,
)

LLAMA = load_golden("llama_default")  # untied
TIED = load_golden("llama_tied_gqa4")
GPT2 = load_golden("gpt2_gelu_new")  # tied

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def fitted(folder: Path) -> Checkpoint:
    config = load_config(folder)
    checkpoint = open_checkpoint(folder)
    checkpoint.fit(tensor_layout(config))
    return checkpoint


@pytest.mark.parametrize("case", CASES)
def test_every_layout_has_the_names_and_shapes_of_transformers(case: str) -> None:
    golden = load_golden(case)
    config = load_config(golden.folder)
    layout = tensor_layout(config)
    stored = golden.shapes
    for old, new in layout.renames.items():
        stored = {re.sub(rf"^{re.escape(old)}", new, name): shape for name, shape in stored.items()}
    stacks = {name: stack for name, stack in layout.stacks.items() if name in stored}
    stacked = {name for stack in stacks.values() for name in stack.part_names}
    shapes = {name: shape for name, shape in layout.shapes.items() if name not in stacked}
    assert shapes | {name: stack.shape for name, stack in stacks.items()} == stored


def rewrite(folder: Path, change: Callable[[dict[str, Array]], Any], golden: Any = LLAMA) -> Path:
    """A model folder whose tensors were changed in place."""
    write_model(folder, golden)
    tensors = golden_tensors(golden)
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(WeightsError) as caught:
        fitted(folder)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    assert str(folder) in str(caught.value)
    return caught.value.problems


MISSHAPEN = f"tensor '{DOWN}' is [72, 48], but the config asks for [48, 72]"
BIAS = "model.layers.0.self_attn.q_proj.bias"
LORA = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({DOWN: None}, f"tensor '{DOWN}' [48, 72] is missing"),
        ({HEAD: None}, f"tensor '{HEAD}' [97, 48] is missing"),  # of an untied model
        ({"extra": np.ones(3, np.float32)}, "tensor 'extra' is left over"),  # the others have a prefix
        ({BIAS: np.ones(48, np.float32)}, f"tensor '{BIAS}' is left over"),
        ({DOWN: lambda array: array.T}, MISSHAPEN),
        ({DOWN: lambda array: array.astype(np.int64)}, f"tensor '{DOWN}' is I64, not F32, F16 or BF16"),
        ({DOWN: lambda array: array.astype(np.bool_)}, f"tensor '{DOWN}' is BOOL, not F32, F16 or BF16"),
        ({LORA: np.ones((4, 48), np.float32)},
         f"tensor '{LORA}' of an adapter that is not merged (peft: `merge_and_unload`) is left over"),
    ],
)  # fmt: skip
def test_one_offender(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    def change(tensors: dict[str, Array]) -> None:
        for name, new in changes.items():
            old = tensors.pop(name, None)
            if new is not None:
                tensors[name] = new(old) if callable(new) else new

    assert problems_of(rewrite(tmp_path, change)) == (f"model.safetensors: {problem}",)


def test_another_vocabulary_than_the_configs(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    change_config(tmp_path, vocab_size=98)
    assert problems_of(tmp_path) == (
        f"model.safetensors: tensor '{EMBED}' is [97, 48], but the config asks for [98, 48]",
        f"model.safetensors: tensor '{HEAD}' is [97, 48], but the config asks for [98, 48]",
    )


def test_all_offenders_are_listed_at_once(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Array]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.down_proj.weight"] = np.ones(3, np.float32)
        tensors[DOWN] = tensors[DOWN][:, :-1].astype(np.int64)

    problems = problems_of(rewrite(tmp_path, spoil))
    assert len(problems) == 4
    for part in ("model.norm.weight", "layers.9", "is [48, 71]", "is I64"):
        assert sum(part in problem for problem in problems) == 1


def test_many_offenders_are_counted(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    change_config(tmp_path, num_hidden_layers=20)
    with pytest.raises(WeightsError, match=r"162 tensors do not fit the config:(?s:.*)\.\.\. and 112 more$") as caught:
        fitted(tmp_path)
    assert len(caught.value.problems) == 18 * 9


def test_harmless_buffers_are_passed_over(tmp_path: Path) -> None:
    def add_buffers(tensors: dict[str, Array]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    fitted(rewrite(tmp_path / "llama", add_buffers))

    def add_masks(tensors: dict[str, Array]) -> None:
        tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 96, 96), np.bool_)
        tensors["transformer.h.1.attn.masked_bias"] = np.array(-1e4, np.float32)

    fitted(rewrite(tmp_path / "gpt2", add_masks, GPT2))


def test_gpt2_as_the_hub_stores_it(tmp_path: Path) -> None:
    """No prefix, the causal masks, and a copy of the tied table."""

    def change(tensors: dict[str, Array]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
        without_prefix(tensors, "transformer.")
        for index in range(2):
            tensors[f"h.{index}.attn.bias"] = np.ones((1, 1, 96, 96), np.float32)

    checkpoint = fitted(rewrite(tmp_path, change, GPT2))
    for name, array in golden_tensors(GPT2).items():
        np.testing.assert_array_equal(checkpoint[name].array(), array)


def without_prefix(tensors: dict[str, Array], prefix: str) -> None:
    for name in list(tensors):
        tensors[name.removeprefix(prefix)] = tensors.pop(name)


@pytest.mark.parametrize(("golden", "prefix"), [(GPT2, "transformer."), (LLAMA, "model."), (TIED, "model.")])
def test_names_without_the_prefix(tmp_path: Path, golden: Any, prefix: str) -> None:
    checkpoint = fitted(rewrite(tmp_path, lambda tensors: without_prefix(tensors, prefix), golden))
    for name, array in golden_tensors(golden).items():
        np.testing.assert_array_equal(checkpoint[name].array(), array)


def test_a_stored_copy_of_the_tied_table(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, Array]) -> None:
        tensors[HEAD] = tensors[EMBED].copy()

    fitted(rewrite(tmp_path / "same", add_head, TIED))

    def add_other_head(tensors: dict[str, Array]) -> None:
        add_head(tensors)
        tensors[HEAD][3, 5] += 1

    (problem,) = problems_of(rewrite(tmp_path / "other", add_other_head, TIED))
    assert problem.startswith(f"model.safetensors: tensor '{HEAD}' differs from '{EMBED}'")

    def add_short_head(tensors: dict[str, Array]) -> None:
        tensors[HEAD] = tensors[EMBED][:-1]

    (problem,) = problems_of(rewrite(tmp_path / "short", add_short_head, TIED))
    assert problem == f"model.safetensors: tensor '{HEAD}' is [96, 64], but the config asks for [97, 64]"


def test_a_tied_table_stored_under_the_heads_name_only(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Array]) -> None:
        tensors[HEAD] = tensors.pop("transformer.wte.weight")

    checkpoint = fitted(rewrite(tmp_path, rename, GPT2))
    np.testing.assert_array_equal(
        checkpoint["transformer.wte.weight"].array(), golden_tensors(GPT2)["transformer.wte.weight"]
    )


def test_main_dtype_is_that_of_most_elements(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA, "BF16")
    tensors = golden_tensors(LLAMA, "BF16")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoint = fitted(tmp_path)
    assert checkpoint.main_dtype() is bfloat16
    assert checkpoint.dtype("model.norm.weight") is float32


# ---------------------------------------------------------------- shards


def sharded(folder: Path, golden: Any = LLAMA) -> dict[str, dict[str, Array]]:
    """A model folder in two shards; returns them."""
    write_model(folder, golden)
    (folder / "model.safetensors").unlink()
    tensors = list(golden_tensors(golden).items())
    middle = len(tensors) // 2
    shards = {
        "model-00001-of-00002.safetensors": dict(tensors[:middle]),
        "model-00002-of-00002.safetensors": dict(tensors[middle:]),
    }
    write_shards(folder, shards)
    return shards


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    checkpoint = fitted(tmp_path)
    for name, array in golden_tensors(LLAMA).items():
        np.testing.assert_array_equal(checkpoint[name].array(), array)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (Path.unlink, "the file is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "tensor .* the file is truncated"),
    ],
)
def test_a_spoilt_shard(tmp_path: Path, spoil: Callable[[Path], Any], problem: str) -> None:
    sharded(tmp_path)
    spoil(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(WeightsError, match=f"model-00002-of-00002.safetensors: {problem}"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    shards = sharded(tmp_path)
    placed = {name: shard for shard, tensors in shards.items() for name in tensors}
    (first_file, first), (second_file, second) = shards.items()
    second[EMBED] = first[EMBED] + 1
    write_shards(tmp_path, shards, placed)
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(tmp_path)
    problem = f"{second_file}: tensor '{EMBED}' is stored in {first_file} already, with other numbers"
    assert caught.value.problems == (problem,)


def test_the_tensors_of_the_files_count_wherever_the_index_places_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = sharded(tmp_path)
    (first, in_first), (second, in_second) = shards.items()
    placed = dict.fromkeys(in_first, first) | dict.fromkeys(in_second, second)
    placed[EMBED] = second  # elsewhere
    del placed["model.norm.weight"]  # stored, but not placed
    placed["ghost"] = first  # placed, but not stored, and nobody asks for it
    in_second[EMBED] = in_first[EMBED]  # twice, the same
    write_shards(tmp_path, shards, placed)
    checkpoint = fitted(tmp_path)
    for name, array in golden_tensors(LLAMA).items():
        np.testing.assert_array_equal(checkpoint[name].array(), array)
    assert "index.json does not name 1 tensors of its files, such as 'model.norm.weight'" in caplog.text


def test_model_safetensors_beside_an_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers takes the one file, which is what `save_pretrained` leaves of a folder that had shards."""
    shards = sharded(tmp_path)
    whole = {name: array + 1 for shard in shards.values() for name, array in shard.items()}
    write_safetensors(tmp_path / "model.safetensors", whole)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    np.testing.assert_array_equal(fitted(tmp_path)[EMBED].array(), whole[EMBED])
    assert "model.safetensors is taken, as transformers does" in caplog.text
    assert "which names model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, is not read" in caplog.text


def test_files_without_an_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    checkpoint = fitted(tmp_path)
    for name, array in golden_tensors(LLAMA).items():
        np.testing.assert_array_equal(checkpoint[name].array(), array)
    assert "read from model-00001-of-00002.safetensors to model-00002-of-00002.safetensors, 2 files" in caplog.text
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"shards are missing:\n.*model-00001-of-00002.safetensors: the file is"):
        open_checkpoint(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    write_safetensors(tmp_path / "my-model.fp32.safetensors", {**shards["model-00001-of-00002.safetensors"]})
    write_safetensors(tmp_path / "rest.safetensors", {**shards["model-00002-of-00002.safetensors"]})
    assert list(fitted(tmp_path).tensors) == list(checkpoint.tensors)
    assert "the weights are read from my-model.fp32.safetensors to rest.safetensors, 2 files" in caplog.text
    write_safetensors(tmp_path / "other.safetensors", {EMBED: np.zeros(3, np.float32)})
    with pytest.raises(WeightsError, match=f"other.safetensors: tensor '{EMBED}' is stored in my-model.fp32"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\x.safetensors",
        "..",
        "",
        "C:x",
        3,
        None,
    ],
)
def test_an_index_that_points_outside_the_folder(tmp_path: Path, shard: Any) -> None:
    folder = tmp_path / "model"
    sharded(folder)
    write_safetensors(tmp_path / "secret.safetensors", {EMBED: np.ones(3, np.float32)})
    write_shards(folder, {}, {EMBED: shard})
    with pytest.raises(ConfigError, match=f"places '{EMBED}' in {re.escape(repr(shard))}, which is no file name of"):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": "x"}'])
def test_an_index_without_a_map(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match="weight_map must be an object"):
        open_checkpoint(tmp_path)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"has neither model.safetensors nor .*pytorch_model.bin cannot be used"):
        open_checkpoint(tmp_path)


def renamed(tensors: dict[str, Array], change: Callable[[str], str]) -> None:
    for name in list(tensors):
        tensors[change(name)] = tensors.pop(name)


@pytest.mark.parametrize(
    "change",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: name.replace("model.layers.", "model._orig_mod.layers."),
        lambda name: name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."),
        lambda name: name.replace("q_proj.", "q_proj.base_layer."),
    ],
)
def test_names_that_wrappers_leave(
    change: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = fitted(rewrite(tmp_path, lambda tensors: renamed(tensors, change)))
    assert set(checkpoint.tensors) == set(golden_tensors(LLAMA))
    assert caplog.text.count("parts of a wrapper") == 1


def test_an_adapter_that_is_not_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, LLAMA)
    (tmp_path / "adapter_config.json").write_text("{}")
    fitted(tmp_path)
    assert "adapter_config.json is not read: the answers are those of the weights alone" in caplog.text
    change_config(tmp_path, peft_type="LORA")
    with pytest.raises(ConfigError, match=r"peft_type = 'LORA': an adapter beside the weights is not implemented"):
        load_config(tmp_path)


def test_modules_of_another_model_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers does with a value head, and a text model's class with the files of one that reads pictures."""

    def add(tensors: dict[str, Array]) -> None:
        renamed(tensors, lambda name: name.replace("model.", "model.language_model.", 1))
        tensors["model.visual.blocks.0.weight"] = tensors["v_head.summary.weight"] = np.ones((1, 48), np.float32)

    assert set(fitted(rewrite(tmp_path, add)).tensors) == set(golden_tensors(LLAMA))
    assert "2 tensors, such as 'model.visual.blocks.0.weight', are of a module" in caplog.text


def test_float64_is_read_as_float32(tmp_path: Path) -> None:
    def widen(tensors: dict[str, Array]) -> None:
        tensors[DOWN] = tensors[DOWN].astype(np.float64) * (1 + 1e-12)

    checkpoint = fitted(rewrite(tmp_path, widen))
    assert checkpoint.dtype(DOWN) is float32
    np.testing.assert_array_equal(checkpoint[DOWN].array(), golden_tensors(LLAMA)[DOWN])


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8_without_quantization_is_read_as_bfloat16(tmp_path: Path, kind: Any) -> None:
    """As transformers reads it; scales beside it would be left over, and a scheme's parts stay as they are stored."""
    stored = golden_tensors(LLAMA)[DOWN].astype(kind)
    rewrite(tmp_path, lambda tensors: tensors.update({DOWN: stored}))
    with pytest.raises(WeightsError, match=r"is F8_E[45]M[23], not F32, F16 or BF16"):
        fitted(tmp_path)
    checkpoint = open_model(tmp_path).checkpoint()
    assert checkpoint.dtype(DOWN) is bfloat16
    np.testing.assert_array_equal(checkpoint[DOWN].array().astype(np.float32), stored.astype(np.float32))


def test_a_bias_of_zeros_that_no_map_has(tmp_path: Path) -> None:
    fitted(rewrite(tmp_path, lambda tensors: tensors.update({BIAS: np.zeros(48, np.float32)})))


def test_weights_that_are_a_dangling_link(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("blobs/4d7a")
    with pytest.raises(WeightsError, match=r"model.safetensors: is a link to blobs/4d7a, which is not there"):
        open_checkpoint(tmp_path)
