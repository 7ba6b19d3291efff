"""auto-round's packings, written by its own library: the weights that they stand for, bit for bit
(`tools.references.make_auto_round`)."""

from __future__ import annotations

import json
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

FILE = Path(__file__).parent / "fixtures" / "auto_round" / "model.safetensors"


def _cases() -> dict[str, dict[str, Any]]:
    content = FILE.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    found: dict[str, dict[str, Any]] = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["cases"])
    return found


CASES = _cases()
TENSORS = open_checkpoint(FILE.parent).tensors


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
    ({"packing_format": "auto_round:nvfp4"}, "packing_format 'auto_round:nvfp4' is not supported; supported are"),
    ({"bits": 5}, "bits is 5, must be 2, 3, 4, 8 or 16"),
    ({"bits": 2, "packing_format": "auto_round:auto_awq"}, "bits is 2, must be 4 in AWQ's packing"),
    ({"group_size": 0}, "group_size is 0, must be -1"),
    ({"data_type": "mx_fp"}, "data_type is 'mx_fp', must be 'int'"),
    ({"act_bits": 8}, "act_bits is 8, must be 16 or more"),
    ({"rotation_config": {"kind": "hadamard"}}, "rotation_config"),
    ({"extra_config": {"(": {"bits": 2}}}, "no regular expression"),
    ({"extra_config": {"a": 2}}, "extra_config"),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_refusals(changes: dict[str, Any], problem: str) -> None:
    section = {"bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq", **changes}
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        scheme_of(**section)
