"""Quantised checkpoints that are not what they say: one line with file, tensor or field, and value; never a crash."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from models.checkpoints.model_files import open_model
from models.checkpoints.safetensors_file import SafetensorsFile
from models.errors import ConfigError, ModelLoadError, WeightsError
from models.registry import declare_model, load_model
from runtime.dtype import float32
from runtime.errors import XservError
from tests.models.driver import logits_of
from tests.models.folders import change_config, write_safetensors
from tests.models.quantized.test_fixtures import CASES, FIXTURES, IDS, copied

Array = np.ndarray[Any, Any]
LAYER = "model.layers.0."
Q = f"{LAYER}self_attn.q_proj"


def tensors_of(folder: Path) -> dict[str, Array]:
    file = SafetensorsFile(folder / "model.safetensors")
    return {name: file.array(name).copy() for name in file.tensors}


def changed(folder: Path, case: str, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """A fixture with other tensors (None: without; a function: of the stored one) and quantization_config (`...`:
    without)."""
    folder = copied(case, folder)
    stored = tensors_of(folder)
    for name, value in (tensors or {}).items():
        if value is None:
            del stored[name]
        else:
            stored[name] = value(stored[name]) if callable(value) else value
    write_safetensors(folder / "model.safetensors", stored)
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    said = {key: value for key, value in {**said, **config}.items() if value is not ...}
    return change_config(folder, quantization_config=said)


def with_entry(index: int, value: Any) -> Callable[[Array], Array]:
    """A copy with another entry, counted in the flat array."""

    def change(array: Array) -> Array:
        array = array.copy()
        array.reshape(-1)[index] = value
        return array

    return change


def no_groups(**changes: Any) -> dict[str, Any]:
    """config_groups with other weights."""
    said = json.loads((FIXTURES / "ct_w4_group" / "config.json").read_text())["quantization_config"]["config_groups"]
    said["group_0"]["weights"].update(changes)
    return {"config_groups": said}


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq_w4", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; supported are fp8,"),
    ("ct_int8_channel", {"quant_method": ...}, "quantization_config: quant_method is missing; supported are fp8, "),
    ("gptq_w4", {"quant_method": 3}, "quant_method must be a string, not 3"),
    ("gptq_w4", {"bits": 5}, "quantization_config: bits is 5, must be 2, 3, 4 or 8"),
    ("gptq_w4", {"bits": ...}, "bits is missing"),
    ("gptq_w4", {"group_size": 0}, r"group_size is 0, must be -1 \(all of a row\) or more than 0"),
    ("gptq_w4", {"format": "marlin", "checkpoint_format": "marlin"}, "format is 'marlin', must be 'gptq' or"),
    ("gptq_w4", {"format": "gptq_v2"}, "format is 'gptq_v2', must be"),
    ("gptq_w4", {"pack_dtype": "int16"}, "pack_dtype = 'int16' is not supported for quant_method gptq"),
    ("gptq_w4", {"new_feature": 1}, "new_feature = 1 is not supported for quant_method gptq"),
    ("gptq_w4", {"dynamic": {"(": {}}}, r"dynamic has '\(', which is no regular expression: "),
    ("gptq_w4", {"dynamic": {"x": {"bits": 5}}}, "quantization_config: dynamic: x: bits is 5, must be 2, 3, 4 or 8"),
    ("gptq_w4", {"dynamic": {"x": {"rotation": 5}}}, "x: rotation = 5 is not supported"),
    ("awq_w4", {"bits": 8}, "bits = 8 is not supported for quant_method awq"),
    ("awq_w4", {"version": "gemv"}, "version = 'gemv' is not supported for quant_method awq"),
    ("fp8_block", {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
    ("fp8_block", {"activation_scheme": "none"}, "activation_scheme is 'none', must be 'dynamic' or 'static'"),
    ("fp8_block", {"weight_block_size": [128]}, r"weight_block_size must be \[rows, elements\], not \[128\]"),
    ("fp8_block", {"weight_block_size": [0, 128]}, r"weight_block_size\[0\] must be from 1 to 1048576, not 0"),
    ("ct_w4_group", {"format": "marlin-24"}, "format 'marlin-24' is not supported; supported are int-quantized, "),
    ("ct_w4_group", {"config_groups": {}}, "config_groups is missing or empty"),
    ("ct_w4_group", {"transform_config": {"x": 1}}, "transform_config = {'x': 1} is not supported"),
    ("ct_w4_group", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config: format = 'sparse-24' is not"),
    (
        "ct_w4_group",
        no_groups(num_bits=9),
        r"weights: num_bits is 9, must be 2 or 3 or 4 or 5 or 6 or 7 or 8 for pack-q",
    ),
    ("ct_w4_group", no_groups(type="float"), "weights: type is 'float', must be 'int' for pack-quantized"),
    ("ct_w4_group", no_groups(strategy="block"), r"block_structure must be \[rows, elements\], not None"),
    ("ct_w4_group", no_groups(group_size=None), "group_size is None, must be more than 0 for the strategy 'group'"),
    ("ct_w4_group", no_groups(dynamic=True), "weights: dynamic is True, must be False for pack-quantized"),
    ("modelopt_fp8", {"quant_algo": "INT9"}, "quant_algo 'INT9' is not supported; supported are FP8, FP8_PER_CHANNEL"),
    ("modelopt_fp8", {"quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing or empty, which quant_algo MIXED"),
    ("modelopt_fp8", {"group_size": 16}, "group_size is 16, must be 0 for FP8"),
    ("modelopt_fp8", {"rotation": 1}, "rotation = 1 is not supported for quant_method modelopt"),
    ("modelopt_mixed", {"quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 0}}}, "a: group_size is 0, m"),
    ("modelopt_mixed", {"quantized_layers": {"a": {"quant_algo": "NVFP4", "pre_quant_scale": True}}}, "pre_quant"),
    ("ct_w4_group", {"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme: num_bits is 4 of type 'int', must be 8"),
]


@pytest.mark.parametrize(("case", "config", "message"), CONFIGS, ids=[case[2][:50] for case in CONFIGS])
def test_a_config_that_is_not_supported(tmp_path: Path, case: str, config: dict[str, Any], message: str) -> None:
    folder = changed(tmp_path, case, **config)
    for use in (load_model, declare_model):
        with pytest.raises(ConfigError, match=message) as caught:
            use(folder)
        assert "config.json: quantization_config" in str(caught.value)
        assert "\n" not in str(caught.value)


NAN = float("nan")
TENSORS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("gptq_w4", {f"{Q}.qzeros": None}, {}, f"tensor '{Q}.qzeros' is missing, which '{Q}.g_idx' needs"),
    ("gptq_w4", {f"{Q}.scales": with_entry(5, NAN)}, {}, rf"tensor '{Q}.scales' has the scale nan at \[5, 0\]"),
    ("gptq_w4", {f"{Q}.scales": lambda a: a[:1]}, {}, rf"tensor '{Q}.scales' is \[1, 32\], must be \[2, 32\]"),
    ("gptq_w4", {f"{Q}.qweight": lambda a: a[:-1]}, {}, rf"'{Q}.qweight' is \[7, 32\], must be \[8, any\] for 64"),
    ("gptq_w4", {f"{Q}.qweight": lambda a: a.view(np.float32)}, {}, f"'{Q}.qweight' is F32, must be I32"),
    ("gptq_w4", {f"{Q}.qzeros": with_entry(0, 0)}, {}, rf"'{Q}.qzeros' stores the zero 0, but with sym all are 7 \("),
    ("gptq_w4", {f"{Q}.qzeros": lambda a: a * 0 + 0x77777778}, {}, f"'{Q}.qzeros' stores the zero 8, but with sym"),
    ("gptq_w4", {f"{Q}.g_idx": with_entry(40, 0)}, {}, f"'{Q}.g_idx' has group 0 at 40, but without desc_act"),
    ("gptq_w4", {}, {"group_size": 16}, rf"'{Q}.scales' is \[2, 32\], must be \[4, 32\]"),
    ("gptq_w4", {f"{Q}.bad": np.zeros(1, np.float32)}, {}, f"tensor '{Q}.bad' is left over"),
    ("gptq_w4_reordered", {f"{Q}.g_idx": with_entry(3, 2)}, {}, f"'{Q}.g_idx' has group 2 at 3, must be from 0 to 1"),
    ("gptq_w4_reordered", {f"{Q}.g_idx": with_entry(3, -1)}, {}, "has group -1 at 3, must be from 0 to 1"),
    ("gptq_w4_reordered", {f"{Q}.g_idx": lambda a: a * 0}, {}, "gives group 0 64 columns, must be 32"),
    ("gptq_w4_reordered", {f"{Q}.g_idx": None}, {}, f"'{Q}.g_idx' is missing, which '{Q}.qweight' needs"),
    ("gptq_dynamic", {}, {"dynamic": {"-:.*q_proj": {}}}, f"'{Q}.qweight' is stored, but `dynamic` says that"),
    ("awq_w4", {f"{Q}.qzeros": lambda a: a[:, :1]}, {}, rf"'{Q}.qzeros' is \[2, 1\], must be \[2, 4\]"),
    ("awq_w4", {}, {"modules_to_not_convert": ["q_proj"]}, f"'{Q}.qweight' is stored, but modules_to_not_convert"),
    ("fp8_block", {f"{Q}.weight_scale_inv": None}, {}, f"'{Q}.weight_scale_inv' is missing, which '{Q}.weight' needs"),
    ("fp8_block", {f"{Q}.weight_scale_inv": lambda a: a[:1]}, {}, rf"is \[1, 2\], must be \[2, 2\]: '{Q}.weight' is"),
    ("fp8_block", {f"{Q}.weight_scale_inv": with_entry(3, np.inf)}, {}, r"has the scale inf at \[1, 1\]; scales must"),
    ("fp8_block", {}, {"modules_to_not_convert": ["q_proj"]}, f"'{Q}.weight' is F8_E4M3, but modules_to_not_convert"),
    ("fp8_tensor_static", {f"{Q}.activation_scale": None}, {}, f"'{Q}.input_scale' is missing, which '{Q}.weight'"),
    ("fp8_tensor_static", {f"{Q}.activation_scale": np.zeros(1, np.float32)}, {}, "is 0; a scale of all must be"),
    ("fp8_tensor_static", {f"{Q}.activation_scale": np.ones(2, np.float32)}, {}, r"is \[2\], must be one number"),
    ("ct_w4_group", {f"{Q}.weight_shape": np.array([32, 72])}, {}, rf"is \[32, 8\], must be \[32, 9\]: '{Q}.weight_s"),
    ("ct_w4_group", {f"{Q}.weight_shape": np.array([-1, 64])}, {}, rf"is \[32, 8\], must be \[-1, 8\]: '{Q}.weight_sh"),
    ("ct_w4_group", {f"{Q}.weight_shape": None}, {}, f"tensor '{Q}.weight_shape' is missing, which"),
    ("ct_w4_group", {}, {"ignore": ["re:.*q_proj"]}, f"'{Q}.weight_packed' is I32, but `ignore` names the module"),
    ("ct_w4_group", {f"{Q}.weight_zero_point": np.zeros(1, np.int32)}, {}, f"'{Q}.weight_zero_point' is left over"),
    ("ct_w4_asymmetric", {f"{Q}.weight_zero_point": None}, {}, f"'{Q}.weight_zero_point' is missing, which"),
    ("ct_w4_reordered", {f"{Q}.weight_g_idx": with_entry(0, 7)}, {}, "has group 7 at 0, must be from 0 to 1"),
    ("ct_int8_channel", {f"{Q}.weight": lambda a: a.view(np.uint8)}, {}, f"'{Q}.weight' is U8, must be I8"),
    ("ct_nvfp4", {f"{Q}.weight_global_scale": with_entry(0, NAN)}, {}, "has the scale nan at"),
    ("ct_nvfp4", {f"{Q}.weight_global_scale": with_entry(0, 1e-38)}, {}, "is 1e-38, by which the scale 448 is more"),
    ("ct_nvfp4", {f"{Q}.weight_scale": with_entry(0, NAN)}, {}, r"has the scale nan at \[0, 0\]"),
    ("ct_mxfp4", {f"{Q}.weight_scale": with_entry(2, 255)}, {}, r"has the scale nan at \[1, 0\]"),
    ("modelopt_fp8", {f"{Q}.weight_scale": np.ones(5, np.float32)}, {}, r"is \[5\], must be \[\] for a matrix"),
    ("modelopt_fp8", {f"{Q}.input_scale": None}, {}, f"'{Q}.input_scale' is missing, which"),
    ("modelopt_fp8", {}, {"ignore": ["*q_proj"]}, f"'{Q}.weight' is F8_E4M3, but exclude_modules names the module"),
    ("modelopt_mixed", {}, {"quantized_layers": {"a": {"quant_algo": "FP8"}}}, "quantized_layers does not name"),
    ("modelopt_mixed", {f"{LAYER}mlp.up_proj.weight_scale_2": with_entry(0, 0)}, {}, "is 0; a scale of all must be gr"),
    ("modelopt_mixed", {f"{LAYER}mlp.up_proj.input_scale": with_entry(0, 0)}, {}, "has the scale inf at"),
    ("modelopt_mixed", {f"{LAYER}mlp.up_proj.pre_quant_scale": np.ones(64, np.float32)}, {}, "is left over"),
    ("ct_fp8_tensor", {f"{Q}.weight_scale": np.ones(5, ml_dtypes.bfloat16)}, {}, r"is \[5\], must be \[1, 1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "tensors", "config", "message"), TENSORS, ids=[case[3][:60] for case in TENSORS])
def test_a_tensor_that_does_not_fit(
    tmp_path: Path, case: str, tensors: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    folder = changed(tmp_path, case, tensors, **config)
    with pytest.raises(WeightsError, match=message) as caught:
        load_model(folder)
    assert all("model.safetensors: tensor" in problem for problem in caught.value.problems)


def test_the_file_beside_config_json_is_named(tmp_path: Path) -> None:
    folder = copied("modelopt_nvfp4", tmp_path)
    said = json.loads((folder / "hf_quant_config.json").read_text())
    said["quantization"]["quant_algo"] = "NVFP3"
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=r"hf_quant_config.json: quantization: quant_algo 'NVFP3' is not supported"):
        load_model(folder)


def test_what_tools_add_is_passed_over(tmp_path: Path) -> None:
    """GPTQ's biases of zeros, and scales of pages in FP8."""
    zeros = {f"{Q}.bias": np.zeros(32, np.float16)}
    load_model(changed(tmp_path / "zeros", "gptq_w4", zeros))
    with pytest.raises(WeightsError, match=rf"tensor '{Q}.bias' is left over"):
        load_model(changed(tmp_path / "ones", "gptq_w4", {f"{Q}.bias": np.ones(32, np.float16)}))
    with pytest.raises(WeightsError, match=r"tensor .lm_head.bias. is left over"):
        load_model(changed(tmp_path / "floats", "gptq_w4", {"lm_head.bias": np.ones(16, np.float16)}))
    pages = {f"{LAYER}self_attn.{name}_proj.output_scale": np.ones(1, np.float32) for name in "kv"}
    load_model(changed(tmp_path / "pages", "fp8_block", pages, kv_cache_scheme="static"))


def test_numbers_are_checked_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = changed(tmp_path, "gptq_w4", {f"{LAYER}mlp.down_proj.scales": with_entry(0, NAN)})
    monkeypatch.setattr("models.registry.LoadingMaker", None)
    message = r"1 tensor has numbers that cannot be:\n.*down_proj.scales' has the scale nan"
    with pytest.raises(WeightsError, match=message):
        load_model(folder)


def test_maps_that_are_stored_inputs_first(tmp_path: Path) -> None:
    """GPT-2's are; a square one would else be read the wrong way round."""
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1,
        "n_positions": 16, "vocab_size": 16,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    }  # fmt: skip
    tensors: dict[str, Array] = {"transformer.wte.weight": np.zeros((16, 32), np.float32)}
    tensors["transformer.wpe.weight"] = np.zeros((16, 32), np.float32)
    shapes = {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32), "mlp.c_fc": (32, 128), "mlp.c_proj": (128, 32)}
    for name, shape in shapes.items():
        tensors[f"transformer.h.0.{name}.weight"] = np.zeros(shape, np.float32)
        tensors[f"transformer.h.0.{name}.bias"] = np.zeros(shape[1], np.float32)
    for norm in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        tensors |= {f"transformer.{norm}.{part}": np.zeros(32, np.float32) for part in ("weight", "bias")}
    name = "transformer.h.0.attn.c_proj.weight"
    tensors[name] = np.zeros((32, 32), ml_dtypes.float8_e4m3fn)
    tensors[f"{name}_scale"] = np.ones(1, np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=rf"tensor '{name}' is quantised \(fp8, a scale for all\), which is not"):
        load_model(tmp_path)


def mutated(rng: random.Random, folder: Path, case: str) -> None:
    """Writes a fixture with one to three changes to its config, or its tensors."""
    config = json.loads((FIXTURES / case / "config.json").read_text())
    if (other := FIXTURES / case / "hf_quant_config.json").exists():
        config["quantization_config"] = {**json.loads(other.read_text()), "quant_method": "modelopt"}
    tensors = tensors_of(FIXTURES / case)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.4:
            mutate_config(rng, config["quantization_config"])
        else:
            mutate_tensor(rng, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)


def mutate_config(rng: random.Random, values: Any) -> None:
    places = []

    def collect(node: Any) -> None:
        for key, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
            places.append((node, key))
            if isinstance(value, dict | list):
                collect(value)

    collect(values)
    node, key = rng.choice(places)
    others = [None, True, False, -1, 0, 1, 3, 8, 32, 1 << 70, 0.5, "", "re:(", "Linear", "group", [], {}, [1, 2], ["a"]]
    if rng.random() < 0.15 and isinstance(node, dict):
        del node[key]
    else:
        node[key] = rng.choice(others)


def mutate_tensor(rng: random.Random, tensors: dict[str, Array]) -> None:
    name = rng.choice([name for name in tensors if "proj" in name] or list(tensors))
    array = tensors[name]
    kind = rng.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name.rpartition(".")[0] + rng.choice([".weight", ".qzeros", ".g_idx", ".weight_scale", ".x"])] = array
    elif kind == 2 and array.ndim:
        tensors[name] = array[: rng.randrange(len(array) + 1)]
    elif kind == 3 and array.size:
        tensors[name] = array.reshape(rng.choice([(1, -1), (-1,), (-1, 1), (1, 1, -1)]))
    elif kind == 4:
        types = [np.int8, np.uint8, np.float16, np.int32, np.float32, np.int64, ml_dtypes.bfloat16]
        with np.errstate(all="ignore"):
            tensors[name] = array.astype(np.float32).astype(rng.choice(types))
    elif array.size:
        raw = bytearray(array.tobytes())
        for _ in range(rng.randint(1, 8)):
            raw[rng.randrange(len(raw))] = rng.choice([0, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        tensors[name] = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)


def fuzz(folder: Path, rounds: int, seed: int) -> dict[str, int]:
    rng, outcomes, problems = random.Random(seed), {"loaded": 0, "refused": 0}, list[str]()
    for number in range(rounds):
        mutated(rng, folder, rng.choice(CASES))
        try:
            model = load_model(folder)
            if number % 10 == 0:
                logits_of(model, IDS)
            outcomes["loaded"] += 1
        except XservError as error:
            outcomes["refused"] += 1
            problems += getattr(error, "problems", [str(error)])
    assert [problem for problem in problems if "\n" in problem] == []
    return outcomes


def test_mutated_checkpoints_load_or_are_refused(tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path, 400, seed=1)
    assert min(outcomes.values()) > 40, outcomes


@pytest.mark.exhaustive
def test_many_mutated_checkpoints(tmp_path: Path) -> None:
    fuzz(tmp_path, 10_000, seed=2)


def test_a_checkpoint_of_a_quantised_model_is_told_by_format(tmp_path: Path) -> None:
    stored = open_model(FIXTURES / "ct_mixed").checkpoint().bytes_by_format()
    assert stored.keys() == {"BF16", "fp8, a scale a row", "int8, groups of 32", "int4, groups of 32"}


@pytest.mark.parametrize(
    ("case", "is_reordered", "zeros"), [("gptq_w4", False, (0x77777777, 0x88888888)),
                                        ("gptq_w8_reordered", True, (0x7F7F7F7F, 0x80808080))],
)  # fmt: skip
@pytest.mark.parametrize("name", ["gptq", "gptq_v2"])
def test_symmetric_zeros_are_the_middle_in_either_format(
    tmp_path: Path, case: str, is_reordered: bool, zeros: tuple[int, int], name: str
) -> None:
    """A file whose label and zeros are of two formats: the numbers are those of zeros that are stored as they are."""

    def floats(stored: int, **said: Any) -> Array:
        words = {tensor: np.full_like(array, np.uint32(stored).view(np.int32))
                 for tensor, array in tensors_of(FIXTURES / case).items() if tensor.endswith("qzeros")}  # fmt: skip
        folder = changed(tmp_path / f"{stored} {said['sym']}", case, words, desc_act=is_reordered, **said)
        checkpoint = open_model(folder).checkpoint()
        checkpoint.check_numbers()
        return checkpoint[f"{Q}.weight"].matrix().dequantise(float32)

    right = floats(zeros[1], sym=False, format="gptq_v2", checkpoint_format="gptq_v2")
    for stored in zeros:
        np.testing.assert_array_equal(floats(stored, sym=True, format=name, checkpoint_format=name), right)


def test_a_folder_of_mlx_is_told_to_be_one(tmp_path: Path) -> None:
    said = {"group_size": 64, "bits": 4, "mode": "affine"}
    folder = change_config(copied("gptq_w4", tmp_path), quantization=said, quantization_config=said)
    with pytest.raises(
        ConfigError, match=r"config.json: quantization is MLX's \(affine, 4 bits, groups of 64\): .* --dequantize`"
    ):
        load_model(folder)
