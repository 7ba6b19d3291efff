"""Low-rank adapters beside PEFT's own logits, alone and in a batch with others; wrong folders."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.adapter_changes import changes_of
from models.adapter_modules import in_own_order, resolve_modules
from models.errors import ModelLoadError
from models.peft import rank_and_base, read_adapter
from models.registry import declare, load_model
from runtime.errors import InvalidArgumentError
from runtime.linear.adapter_pairs import Change, Pair, Rows
from runtime.linear.low_rank import LowRankMaps
from runtime.linear.options import LoadOptions
from runtime.tensor.tensor import Tensor
from tests.models.adapter_cases import CASES, AdapterGolden, load_adapter_golden, write_adapter
from tests.models.driver import Array, ModelDriver, relative_error, rotary_offset_of
from tests.models.folders import CASES as GOLDENS
from tests.models.folders import golden_tensors, load_golden, write_model, write_safetensors
from tests.models.gguf.files import write_gguf

WITHOUT, OWN, OTHER = -1, 1, 0


def adapted(
    tmp_path: Path, case: str, device: str, *, exact: bool = False, is_gguf: bool = False
) -> tuple[Any, AdapterGolden]:
    """A golden's model with the case's adapter in a slot, and in another one of half its size."""
    golden = load_adapter_golden(case)
    maps = LowRankMaps(3, 64 if case == "saved_map" else 8)  # a map that was retrained whole has its full rank
    folder = write_model(tmp_path / "model", golden.golden)
    if is_gguf:
        config = json.loads((golden.golden.folder / "config.json").read_text(encoding="utf-8"))
        folder = write_gguf(tmp_path / "model.gguf", config, golden_tensors(golden.golden))
    model = load_model(folder, addends=maps, device=device, dtype="float32", exact=exact)
    maps.allocate(LoadOptions(device=model.device, dtype=model.dtype, exact=exact))
    found = read_adapter(write_adapter(tmp_path / "adapter", case))
    changes = changes_of(found, maps, model, lambda: declare(folder, dtype="float32").source).pairs
    maps.check(changes)
    maps.write(OWN, changes)
    maps.write(OTHER, {module: halved(change) for module, change in changes.items()})
    return model, golden


def halved(change: Change) -> Change:
    """Half of a change."""
    half = np.float32(0.5)
    if isinstance(change, Rows):
        return change._replace(values=change.values * half)
    return change._replace(up=change.up * half, bias=None if change.bias is None else change.bias * half)


def logits_of(model: Any, ids: list[int], adapters: list[int], cut: int) -> list[Array]:
    """Logits of sequences of the same ids, with an adapter each, in two steps."""
    counts = {0: cut, cut: len(ids) - cut}

    def complete(batch: Any, first: int) -> None:
        batch.adapters = Tensor.from_numpy(np.repeat(np.array(adapters, np.int32), counts[first])).to(model.device)

    driver = ModelDriver(model, len(adapters), complete=complete, rotary_offset=rotary_offset_of(model, len(ids)))
    rows = [driver.step(dict.fromkeys(range(len(adapters)), part)) for part in (ids[:cut], ids[cut:])]
    return [np.concatenate([each[number] for each in rows]) for number in range(len(adapters))]


@pytest.mark.parametrize("case", CASES)
def test_rows_are_as_pefts(tmp_path: Path, case: str) -> None:
    model, golden = adapted(tmp_path, case, "cpu")
    ids = golden.golden.prompt_ids
    found = logits_of(model, ids, [OWN, WITHOUT, OTHER, OWN], len(ids) // 2)
    assert relative_error(found[0], golden.logits) <= 2e-5
    assert relative_error(found[1], golden.golden.logits["float32"]) <= 2e-5
    assert relative_error(found[2], found[0]) > 1e-2
    np.testing.assert_array_equal(found[3], found[0])
    np.testing.assert_array_equal(found[0], logits_of(model, ids, [OWN], 1)[0])
    np.testing.assert_array_equal(found[1], logits_of(model, ids, [WITHOUT], len(ids) // 2)[0])


@pytest.mark.parametrize("case", ["llama", "qwen2_patterns", "phi3", "qwen3_5"])
def test_a_gguf_file_of_the_model_takes_the_same_adapter(tmp_path: Path, case: str) -> None:
    """llama.cpp's converter moves rows and columns of some maps."""
    model, golden = adapted(tmp_path, case, "cpu", is_gguf=True)
    ids = golden.golden.prompt_ids
    own, without = logits_of(model, ids, [OWN, WITHOUT], len(ids) // 2)
    assert relative_error(own, golden.logits) <= 2e-5
    assert relative_error(without, golden.golden.logits["float32"]) <= 2e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
@pytest.mark.parametrize("case", ["llama_bias", "gpt2", "gemma3", "qwen3_5", "gpt_oss_experts", "qwen3_moe_experts",
                                  "latent", "latent_scaled", "layer_inputs"])  # fmt: skip
def test_a_gpu_gives_the_same(tmp_path: Path, case: str, device: str) -> None:
    model, golden = adapted(tmp_path, case, device, exact=True)
    ids = golden.golden.prompt_ids
    found = logits_of(model, ids, [OWN, WITHOUT, OTHER], len(ids) - 1)
    assert relative_error(found[0], golden.logits) <= 2e-5
    assert relative_error(found[1], golden.golden.logits["float32"]) <= 2e-5
    np.testing.assert_array_equal(found[0], logits_of(model, ids, [OWN], len(ids) - 1)[0])


USUAL = ("apertus_odd", "cohere2_windows", "deepseek_v2_odd", "gemma4_keys_odd", "glm4_odd", "gpt_neox_odd",
         "internlm2_grouped", "lfm2_moe_odd", "nemotron_h_odd", "qwen3_next_odd")  # fmt: skip


TAKE_NONE = ("q_norm", "k_norm", "wpe", "embed_tokens_per_layer")


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[] if case in USUAL else [pytest.mark.exhaustive]) for case in GOLDENS
])  # fmt: skip
def test_an_adapter_does_what_merged_weights_do(tmp_path: Path, case: str) -> None:
    """In every family, on every map that takes one, whatever order the model keeps rows and columns in."""
    golden = load_golden(case)
    tensors, maps = golden_tensors(golden), LowRankMaps(1, 3)
    model = load_model(write_model(tmp_path / "model", golden), addends=maps, dtype="float32")
    maps.allocate(LoadOptions(dtype=model.dtype))
    rng, given = np.random.default_rng(1), dict[str, Pair]()
    for name, array in list(tensors.items()):
        module = name.removesuffix(".weight")
        if array.ndim != 2 or module == name:
            continue
        is_turned = case.startswith("gpt2") and module.rpartition(".")[2].startswith("c_")
        outputs, inputs = array.shape[::-1] if is_turned else array.shape
        down = rng.standard_normal((3, inputs)).astype(np.float32) / np.float32(inputs**0.5)
        up = rng.standard_normal((outputs, 3)).astype(np.float32) * np.float32(0.1)
        try:
            found = resolve_modules({module: Pair(down, up)}, maps.modules, model.stacks, model.renames)
        except ModelLoadError:
            assert module.endswith(TAKE_NONE), module
            continue
        change = (up.astype(np.float64) @ down).astype(np.float32)
        tensors[name] = array + (change.T if is_turned else change)
        given[module] = Pair(down, up)
        assert maps.table is not None
        assert maps.head is not None
        if maps.table.name in found:  # a tied head changes with it
            if model.config.tie_word_embeddings:
                given[maps.head.name] = given[module]
            given[module] = Pair(up.T, down.T)
    pairs = in_own_order(resolve_modules(given, maps.modules, model.stacks, model.renames), model.own_order)
    maps.check(pairs)
    maps.write(0, pairs)
    assert len(pairs) >= model.config.num_layers
    write_safetensors(tmp_path / "model" / "model.safetensors", tensors)
    merged = logits_of(load_model(tmp_path / "model", dtype="float32"), golden.prompt_ids, [WITHOUT], 3)[0]
    assert relative_error(logits_of(model, golden.prompt_ids, [0], 3)[0], merged) <= 1e-4


@pytest.mark.parametrize("case", ["llama", "saved_tables", "many_tokens", "qwen3_moe_experts"])
def test_a_slot_is_overwritten_whole(tmp_path: Path, case: str) -> None:
    model, golden = adapted(tmp_path, case, "cpu")
    ids = golden.golden.prompt_ids
    model.addends.write(OWN, {})
    own, without = logits_of(model, ids, [OWN, WITHOUT], 3)
    np.testing.assert_array_equal(own, without)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_heads_bias_is_added(tmp_path: Path, rank: int) -> None:
    """With a pair, and alone, as a retrained bias is."""
    model, golden = adapted(tmp_path, "llama", "cpu")
    maps, ids, rng = model.addends, golden.golden.prompt_ids, np.random.default_rng(0)
    outputs, inputs = maps.modules[maps.head.name]
    down, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((rank, inputs), (outputs, rank)))
    bias = rng.standard_normal(outputs).astype(np.float32)
    changes = {maps.head.name: Pair(down, up, bias)}
    with pytest.raises(InvalidArgumentError, match="has a bias, which a token table has not"):
        maps.check({maps.table.name: Pair(up.T, down.T, np.ones(inputs, np.float32))})
    maps.check(changes)
    maps.write(OWN, changes)
    maps.write(OTHER, {maps.head.name: Pair(down, up)})
    own, other = logits_of(model, ids, [OWN, OTHER], 3)
    np.testing.assert_allclose(own - other, np.broadcast_to(bias, own.shape), rtol=0, atol=1e-5)


_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_MERGE = "merge the adapter"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', must be 'LORA': merge the adapter"),
        ({"peft_type": "PROMPT_TUNING"}, "'PROMPT_TUNING', must be 'LORA': this kind cannot be merged"),
        ({"peft_type": "LILY"}, "'LILY', must be 'LORA': this kind cannot be merged"),
        ({"peft_type": "SHADOW"}, "'SHADOW', must be 'LORA': this kind cannot be merged"),
        ({"arrow_config": {"top_k": 2}}, "Arrow cannot be served as an adapter; this kind cannot be merged"),
        ({"use_dora": True}, "use_dora is True: DoRA cannot be served as an adapter"),
        ({"use_qalora": True}, "use_qalora is True: QA-LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is \[1\]: activated LoRA"),
        ({"target_parameters": "experts.gate_up_proj"}, "target_parameters is .* must be a list of names"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"trainable_token_indices": [3, -1]}, "trainable_token_indices is .* must be token ids"),
        ({"trainable_token_indices": [3, 3]}, "trainable_token_indices is .* has an id twice"),
        ({"r": 0}, "r must be from 1"),
        ({"r": 6}, "has rank 4, r and rank_pattern say 6"),
        ({"lora_alpha": "many"}, "lora_alpha must be a number"),
        ({"rank_pattern": {"(": 4}}, "cannot be matched .*: write the modules' names out"),
        ({"rank_pattern": {"(?x:([a-z0-9_.]+) +)X": 4}}, "cannot be matched .*: write the modules' names out"),
        ({"rank_pattern": {"q_proj": 10**400}}, "q_proj must be finite, not inf"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "q_proj must be finite, not nan"),
        ({"lora_alpha": 1e308}, "holds infinity once scaled by inf"),
        ({"made_up": 7}, "made_up"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_adapter(write_adapter(tmp_path, "llama", config=config))


def test_patterns_are_matched_in_linear_time(tmp_path: Path) -> None:
    bombs = ["([a-z0-9_.]+)+X", "(.*)" * 12 + "X", "(.|..)" * 40 + "X", "(?:[a-z0-9_.]|[a-z0-9_.]){1,30}X"]
    plain = read_adapter(write_adapter(tmp_path / "plain", "llama"))
    started = time.process_time()
    found = read_adapter(write_adapter(tmp_path / "bombs", "llama", config={"rank_pattern": dict.fromkeys(bombs, 9)}))
    assert time.process_time() - started < 30  # backtracking takes years
    assert all(np.array_equal(found.pairs[each].up, plain.pairs[each].up) for each in plain.pairs)


def test_a_folder_whose_path_cannot_be_looked_up_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_adapter(Path("/", "x" * 5000))


def test_defaults_and_notes_of_training_are_harmless(tmp_path: Path) -> None:
    notes = {
        "peft_version": "0.21.2", "inference_mode": True, "lora_dropout": 0.1, "bias": "none", "revision": None,
        "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "loftq_config": {}, "new_field": None,
        "init_lora_weights": "gaussian", "megatron_core": "megatron.core", "corda_config": None,
    }  # fmt: skip
    plain = read_adapter(write_adapter(tmp_path / "plain", "llama"))
    found = read_adapter(write_adapter(tmp_path / "noted", "llama", config=notes))
    assert found.pairs.keys() == plain.pairs.keys()
    assert rank_and_base(tmp_path / "noted") == (4, "base")
    wrong = write_adapter(tmp_path / "wrong", "llama", config={"rank_pattern": [9]})
    assert rank_and_base(wrong) == (4, "base"), "which `read_adapter` refuses"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({_A: np.full((4, 33), np.nan, np.float32)}, "holds NaN or infinity"),
        ({_A: np.ones((4, 33), np.int32)}, "is I32, must be one of F32, F16, BF16"),
        ({_A: np.ones(33, np.float32)}, r"must be \[r, inputs\] and \[outputs, r\]"),
        ({_A.replace("lora_A", "lora_C"): np.ones((4, 4), np.float32)}, "is no part of a LoRA pair"),
        ({_A.replace("q_proj", "x_proj"): np.ones((4, 4), np.float32)}, "x_proj has no lora_B.weight"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 4), np.float32)}, "has no lora_B.weight"),
        (
            {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((4, 4), np.float32)},
            "trainable_token_indices names no rows of model.embed_tokens",
        ),
        ({_A.replace("lora_A.weight", "lora_magnitude_vector.weight"): np.ones(4, np.float32)}, "is DoRA's"),
    ],
)
def test_tensors_that_cannot_be_served_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Array], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_adapter(write_adapter(tmp_path, "llama", tensors=tensors))


_HUGE = {"base_model.model.x.lora_A.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("length", "header", "message"),
    [
        (1 << 60, b"{}", "a header of 1152921504606846976 bytes is more than the limit"),
        (100_000_000, b"{}", "truncated: the header ends at byte"),
        (0, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the header is not JSON"),
        (0, json.dumps(_HUGE).encode(), "does not take the 8 bytes it is given"),
    ],
)
def test_a_file_that_claims_more_than_it_has_is_one_line(
    tmp_path: Path, length: int, header: bytes, message: str
) -> None:
    folder = write_adapter(tmp_path, "llama")
    raw = (length or len(header)).to_bytes(8, "little") + header + bytes(8)
    (folder / "adapter_model.safetensors").write_bytes(raw)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_adapter(folder)
    assert "\n" not in str(caught.value)


def test_ten_thousand_names_are_one_line(tmp_path: Path) -> None:
    names = [f"base_model.model.made_up_{i}.lora_{half}.weight" for i in range(5000) for half in "AB"]
    tensors = {name: np.ones((4, 4), np.float32) for name in names}
    found = read_adapter(write_adapter(tmp_path, "llama", tensors=tensors, is_alone=True))
    with pytest.raises(ModelLoadError, match="is none of the model's") as caught:
        resolve_modules(found.pairs, ["lm_head"])
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no such folder"):
        read_adapter(tmp_path / "nowhere")
    (tmp_path / "adapter.gguf").touch()
    with pytest.raises(
        ModelLoadError, match=r"is a file, but no GGUF; an adapter is a folder with adapter_config\.json"
    ):
        read_adapter(tmp_path / "adapter.gguf")
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json: the file is missing"):
        read_adapter(tmp_path)
    folder = write_adapter(tmp_path / "pickled", "llama")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="is a pickle, which may run code, and is not read"):
        read_adapter(folder)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    maps = LowRankMaps(1, 2)
    golden = load_adapter_golden("llama")
    load_model(write_model(tmp_path / "model", golden.golden), addends=maps)
    pairs = read_adapter(write_adapter(tmp_path / "own", "llama")).pairs
    with pytest.raises(InvalidArgumentError, match="rank 4, limit 2: set max_lora_rank to 4"):
        maps.check(resolve_modules(pairs, maps.modules))
    gpt2 = read_adapter(write_adapter(tmp_path / "gpt2", "gpt2")).pairs
    with pytest.raises(ModelLoadError, match="is none of the model's: the adapter is for another model"):
        resolve_modules(gpt2, maps.modules)
    qwen = read_adapter(write_adapter(tmp_path / "qwen", "gemma3")).pairs
    with pytest.raises(InvalidArgumentError, match="the adapter is for another model"):
        maps.check(resolve_modules({name: pair for name, pair in qwen.items() if "layers.0." in name}, maps.modules))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lm_head.weight": np.ones((99, 33), np.float32)}, r"is \[99, 33\], the model's .*: adapters that add tokens"),
        ({"model.norm.weight": np.full(33, 3, np.float32)}, "retrained model.norm.weight, which is of no linear map"),
        ({"model.layers.0.self_attn.q_proj.bias": np.ones(5, np.float32)}, "retrained .*q_proj.bias, the model none"),
        ({"model.layers.0.mlp.up_proj.weight": np.ones((5, 5), np.float32)}, r"is \[5, 5\], the model's \["),
        ({"model.layers.9.mlp.up_proj.weight": np.ones((5, 5), np.float32)}, "which is of no linear map"),
    ],
)
def test_retrained_parts_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Array], message: str
) -> None:
    maps, golden = LowRankMaps(1, 8), load_adapter_golden("llama")
    folder = write_model(tmp_path / "model", golden.golden)
    model = load_model(folder, addends=maps)
    given = {f"base_model.model.{name}": array for name, array in tensors.items()}
    found = read_adapter(write_adapter(tmp_path / "adapter", "llama", tensors=given))
    with pytest.raises(ModelLoadError, match=message):
        changes_of(found, maps, model, lambda: declare(folder).source)


def test_a_copy_of_the_base_models_own_numbers_changes_nothing(tmp_path: Path) -> None:
    maps, golden = LowRankMaps(1, 8), load_adapter_golden("llama")
    folder = write_model(tmp_path / "model", golden.golden)
    model = load_model(folder, addends=maps)
    stored = golden_tensors(golden.golden)
    copies = {f"base_model.model.{name}": stored[name] for name in ("model.embed_tokens.weight", "model.norm.weight")}
    found = read_adapter(write_adapter(tmp_path / "adapter", "llama", tensors=copies))
    changes = changes_of(found, maps, model, lambda: declare(folder).source).pairs
    assert changes.keys() == found.pairs.keys()


def test_modules_are_found_by_their_place_in_a_layer() -> None:
    pair = Pair(np.zeros((1, 4), np.float32), np.zeros((4, 1), np.float32))
    names = ["model.language_model.layers.3.mlp.up_proj", "model.visual.blocks.3.mlp.up_proj", "lm_head"]
    found = resolve_modules({"language_model.model.layers.3.mlp.up_proj": pair}, names)
    assert found == {names[0]: pair}
    with pytest.raises(ModelLoadError, match="is none of the model's"):
        resolve_modules({"model.layers.0.mlp.experts.3.up_proj": pair}, names)
    with pytest.raises(ModelLoadError, match="is a head of classes"):
        resolve_modules({"score": pair}, names)
    assert resolve_modules({"model.lm_head": pair}, names) == {"lm_head": pair}
    of_nothing = Pair(np.zeros((1, 0), np.float32), np.zeros((4, 1), np.float32))  # there are no shared experts
    assert resolve_modules({"model.layers.0.mlp.shared_experts.down_proj": of_nothing}, names) == {}
