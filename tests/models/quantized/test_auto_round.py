"""auto-round's packings, written by its own library: the weights that they stand for, bit for bit
(`tools.references.make_auto_round`)."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checkpoints.weight_files import open_checkpoint
from models.configuration.json_fields import Fields
from models.errors import ConfigError, WeightsError
from models.quantized.auto_round import AutoRoundScheme
from models.quantized.parts import ModuleTensors, QuantizedTensor
from models.quantized.scheme import read_quantization
from runtime.dtype import float32
from runtime.linear.quantized import ActivationScheme, NumberKind, QuantizedLayout

FOLDER = Path(__file__).parent / "fixtures" / "auto_round"


def _cases(folder: Path) -> dict[str, dict[str, Any]]:
    content = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    found: dict[str, dict[str, Any]] = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["cases"])
    return found


CASES, TENSORS = _cases(FOLDER), open_checkpoint(FOLDER).tensors
FLOATS, PACKED = _cases(FOLDER / "floats"), _cases(FOLDER / "packed")


def scheme_of(**section: Any) -> AutoRoundScheme:
    fields = Fields({"quantization_config": {"quant_method": "auto-round", **section}}, "config.json")
    found = read_quantization(fields)
    assert isinstance(found, AutoRoundScheme)
    return found


def weight(scheme: AutoRoundScheme, case: str, name: str = "model.layers.0.mlp.up_proj") -> np.ndarray:
    module = ModuleTensors(name, {part: TENSORS[f"{case}.{part}"] for part in ("qweight", "qzeros", "scales")})
    parts = scheme.matrix(module)
    assert parts is not None
    made = QuantizedTensor(name, parts, [TENSORS[f"{case}.{part}"] for part in sorted(module.taken)], float32)
    made.check()
    return np.asarray(made.array())


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in CASES[case].values()))
def test_weights(case: str) -> None:
    said = CASES[case]
    found = weight(scheme_of(**said, data_type="int", iters=200, autoround_version="0.16.1"), case)
    np.testing.assert_array_equal(found, TENSORS[f"{case}.expected"].array())


def floats_of(scheme: Any, folder: Path, case: str) -> tuple[np.ndarray, np.ndarray, QuantizedLayout]:
    """A matrix, the library's floats of it, and its layout."""
    tensors = open_checkpoint(folder).tensors
    own = {name.removeprefix(f"{case}."): each for name, each in tensors.items() if name.startswith(f"{case}.")}
    expected = own.pop("expected")
    module = ModuleTensors("model.layers.0.mlp.up_proj", own)
    parts = scheme.matrix(module)
    assert parts is not None
    assert own.keys() - module.taken <= {"input_scale", "input_global_scale"}
    assert expected.dtype is not None
    made = QuantizedTensor(module.name, parts, list(own.values()), expected.dtype)
    made.check()
    return made.array(), expected.array(), parts.layout


@pytest.mark.parametrize("case", FLOATS, ids=lambda case: FLOATS[case]["act_data_type"])
def test_floats(case: str) -> None:
    said = FLOATS[case]
    found, expected, layout = floats_of(scheme_of(**said, fmt="e4m3"), FOLDER / "floats", case)
    if said["data_type"] == "nv_fp":  # by the reciprocal of the scale for all, where compressed-tensors divides
        np.testing.assert_allclose(found, expected, rtol=2e-7)
    else:
        np.testing.assert_array_equal(found, expected)
    kind: NumberKind = "fp4" if said["bits"] == 4 else "fp8"
    rounded = ActivationScheme(kind, said["act_group_size"], not said["act_dynamic"])
    assert layout.activation == (None if "int" in said["data_type"] else rounded)
    without = floats_of(scheme_of(**said | {"act_bits": 16}), FOLDER / "floats", case)[2]
    assert without.activation is None


@pytest.mark.parametrize("case", PACKED, ids=lambda case: f"{PACKED[case]['num_bits']}-{PACKED[case]['symmetric']}")
def test_packed_integers_of_any_bits(case: str) -> None:
    """As format llm_compressor has them."""
    group = {"targets": ["Linear"], "weights": {**PACKED[case], "type": "int"}}
    section = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
        "provider": "auto-round", "moe_sparsity_config": None,
    }  # fmt: skip
    scheme = read_quantization(Fields({"quantization_config": section}, "config.json"))
    found, expected, _ = floats_of(scheme, FOLDER / "packed", case)
    np.testing.assert_array_equal(found, expected)


def test_blocks_of_fp8() -> None:
    """auto_round:fp8, and fp8 as auto-round writes it."""
    tensors = open_checkpoint(FOLDER.parent / "fp8_block").tensors
    name = next(name for name in tensors if name.endswith("q_proj.weight")).removesuffix(".weight")
    own = {part: tensors[f"{name}.{part}"] for part in ("weight", "weight_scale_inv")}
    said = {
        "act_bits": 8, "act_data_type": "fp", "act_dynamic": True, "act_group_size": 32, "act_sym": True, "bits": 8,
        "activation_scheme": "dynamic", "autoround_version": "0.16.1", "data_type": "fp", "enable_quanted_input": False,
        "extra_config": {"lm_head": {"act_bits": 16, "bits": 16, "data_type": "float"}}, "fmt": "e4m3", "sym": True,
        "group_size": [16, 32], "ignored_layers": ["lm_head"], "weight_block_size": [16, 32],
    }  # fmt: skip
    plain = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    made = []
    for section in (
        plain, plain | said, said | {"quant_method": "auto-round", "packing_format": "auto_round:fp8"}
    ):  # fmt: skip
        scheme = read_quantization(Fields({"quantization_config": section}, "config.json"))
        assert scheme is not None
        parts = scheme.matrix(ModuleTensors(name, own))
        assert parts is not None
        made.append((parts.layout, QuantizedTensor(name, parts, list(own.values()), float32).array()))
    for layout, floats in made:
        assert layout == made[0][0]
        np.testing.assert_array_equal(floats, made[0][1])


def test_modules_that_are_not_packed_stay_floats() -> None:
    weight = ModuleTensors("model.layers.0.mlp.up_proj", {"weight": TENSORS["0.expected"]})
    for packing in ("auto_round:fake", "auto_round:llm_compressor"):
        scheme = scheme_of(bits=4, data_type="mx_fp", group_size=32, packing_format=packing, act_bits=4)
        assert scheme.matrix(weight) is None


def case_of(bits: int, packing: str = "auto_round:auto_gptq") -> str:
    return next(
        i for i, said in CASES.items()
        if (said["bits"], said["packing_format"], said["group_size"], said["sym"]) == (bits, packing, 32, True)
    )  # fmt: skip


def test_modules_may_differ() -> None:
    extra = {
        "model.layers.0.mlp.up_proj": {"bits": 2},
        ".*down_proj.*": {"bits": 3, "data_type": "int"},
        "o_proj": {"bits": 2, "group_size": 32},
        "lm_head": {"bits": 16, "data_type": "float"},
    }
    scheme = scheme_of(**CASES[case_of(8)], extra_config=extra)
    for bits, name in (
        (2, "model.layers.0.mlp.up_proj"), (3, "model.layers.1.mlp.down_proj"), (8, "model.layers.10.mlp.up_proj"),
        (2, "model.layers.3.self_attn.o_proj"),
    ):  # fmt: skip
        case = case_of(bits)
        np.testing.assert_array_equal(weight(scheme, case, name), TENSORS[f"{case}.expected"].array())
    assert scheme.matrix(ModuleTensors("lm_head", {"weight": TENSORS["0.expected"]})) is None
    with pytest.raises(WeightsError, match="extra_config says that the module has 16 bits or more"):
        weight(scheme, case_of(8), "lm_head")


REFUSED = [
    ({"packing_format": "auto_round:ours"}, "packing_format 'auto_round:ours' is not supported; supported are"),
    ({"bits": 5}, "bits is 5, must be 2, 3, 4, 8 or 16"),
    ({"bits": 2, "packing_format": "auto_round:auto_awq"}, "bits is 2, must be 4 in AWQ's packing"),
    ({"group_size": 0}, "group_size is 0, must be -1"),
    ({"data_type": "nf"}, "data_type 'nf' is not supported; supported are int, mx_fp"),
    ({"data_type": "mx_fp", "bits": 6}, "bits is 6, must be 4 or 8 for the data_type 'mx_fp'"),
    ({"data_type": "nv_fp", "group_size": -1}, "group_size is -1, must be more than 0 for the data_type 'nv_fp'"),
    ({"data_type": "mx_fp", "sym": False}, "sym is false, must be true"),
    ({"data_type": "mx_fp", "act_bits": 6}, "act_bits is 6 of '', must be 4, 8 or 16"),
    ({"packing_format": "auto_round:llm_compressor"}, "data_type is 'int', must not be integers in"),
    ({"group_size": [128, 128]}, "group_size is (128, 128), must be -1"),
    ({"data_type": "fp8", "bits": 8, "fmt": "e5m2"}, "fmt"),
    ({"act_bits": 8}, "act_bits is 8, must be 16 or more"),
    ({"rotation_config": {"kind": "hadamard"}}, "rotation_config"),
    ({"extra_config": {"(": {"bits": 2}}}, "no regular expression"),
    ({"extra_config": {"a": 2}}, "extra_config"),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_refusals(changes: dict[str, Any], problem: str) -> None:
    section = {"bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq", **changes}
    with pytest.raises(ConfigError, match=re.escape(problem)):
        scheme_of(**section)
