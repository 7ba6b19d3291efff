"""gpt-oss with experts in MXFP4: transformers' floats and logits, and the twins in floats, stacked or not.

`tools/references/make_quantized_models.py mxfp4` makes the model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checkpoints.model_files import open_model
from models.checkpoints.weight_files import open_checkpoint
from models.errors import ConfigError, WeightsError
from models.experts import Experts, MoeDecoder
from models.registry import declare_model, load_config, load_model, tensor_layout
from runtime.dtype import DType, bfloat16, float32
from tests.models.driver import Array, logits_of, relative_error
from tests.models.folders import change_config, write_safetensors

FOLDER = Path(__file__).parent / "gpt_oss_mxfp4"
SAID: dict[str, Any] = json.loads((FOLDER / "said.json").read_text())
IDS: list[int] = SAID["prompt"]
UNDER = "model.layers.1.mlp.experts"


def stored() -> dict[str, Array]:
    """The folder's tensors."""
    checkpoint = open_checkpoint(FOLDER)
    return {name: checkpoint[name].array() for name in checkpoint.tensors}


def twin(folder: Path, dtype: DType, is_stacked: bool) -> Path:
    """The same model in floats, experts of a layer in one tensor or each in its own."""
    checkpoint = open_model(FOLDER).checkpoint()
    whole = {}
    for name in checkpoint.tensors:
        if checkpoint[name].quantized is None:
            whole[name] = checkpoint[name].array()
        else:
            experts, depth, width = checkpoint.tensors[name].shape
            rows = checkpoint[name].matrix().dequantise(dtype).reshape(experts, width, depth)
            whole[name] = np.ascontiguousarray(rows.swapaxes(1, 2))
    if not is_stacked:
        checkpoint.fit(tensor_layout(load_config(FOLDER)))
        whole = {name: np.ascontiguousarray(checkpoint[name].array()) for name in checkpoint.tensors}
    folder.mkdir()
    shutil.copy(FOLDER / "config.json", folder / "config.json")
    write_safetensors(folder / "model.safetensors", whole)
    return change_config(folder, quantization_config=...)


def test_transformers_floats_bit_for_bit() -> None:
    checkpoint = open_model(FOLDER).checkpoint()
    checkpoint.check_numbers()
    found = {name for name in checkpoint.tensors if checkpoint[name].quantized}
    assert found == SAID["floats"].keys()
    for name, expected in SAID["floats"].items():
        floats = checkpoint[name].matrix().dequantise(bfloat16)
        assert hashlib.sha256(floats.tobytes()).hexdigest() == expected["sha256"], name


def test_transformers_logits() -> None:
    expected = np.array(SAID["logits"], np.float32)
    widened = logits_of(load_model(FOLDER, dtype="float32"), IDS)
    assert relative_error(widened, expected) <= 1e-5
    np.testing.assert_array_equal(widened.argmax(1), expected.argmax(1))
    kept = load_model(FOLDER)
    assert isinstance(kept, MoeDecoder)
    mlp = kept.layers[1].mlp  # type: ignore[attr-defined]
    assert isinstance(mlp, Experts)
    assert [weight.experts[2].format.name for weight in (mlp.gate_up, mlp.down)] == ["MXFP4"] * 2
    # Rows of activations are rounded to 8 bits where weights are kept in blocks; some token may take another expert.
    errors = [relative_error(*rows) for rows in zip(logits_of(kept, IDS), expected, strict=True)]
    assert 0 < np.median(errors) < 0.05


@pytest.mark.parametrize("is_stacked", [True, False], ids=["stacked", "apart"])
def test_the_dequantised_twin(tmp_path: Path, is_stacked: bool) -> None:
    own, wide = twin(tmp_path / "own", bfloat16, is_stacked), twin(tmp_path / "wide", float32, is_stacked)
    for dtype, folder in (("bfloat16", own), ("float32", wide)):
        expected = logits_of(load_model(folder, dtype=dtype), IDS)
        np.testing.assert_array_equal(logits_of(load_model(FOLDER, dtype=dtype), IDS), expected)
    for folder in (FOLDER, own):
        assert declare_model(folder).weight_bytes == load_model(folder).weight_bytes
    assert load_model(FOLDER).weight_bytes < load_model(own).weight_bytes


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_a_gpu_keeps_experts_whose_columns_are_in_sixteens(tmp_path: Path) -> None:
    device: Any = "emulated:sm_90a"
    layout: Any = declare_model(FOLDER, device=device)
    model: Any
    model, own = load_model(FOLDER, device=device), load_model(twin(tmp_path / "own", bfloat16, True), device=device)
    assert layout.weight_bytes == model.weight_bytes
    kept: Any = model.layers[1].mlp
    assert [kept.gate_up.packing.name, kept.down.packing.name] == ["e2m1_g32_exponents"] * 2
    expected = logits_of(own, IDS)
    assert relative_error(logits_of(model, IDS), expected) < 2e-2
    rounded: Any = load_model(tmp_path / "own", device=device, quantization="int8")
    assert rounded.layers[1].mlp.down.packing.name == "u8"
    assert relative_error(logits_of(rounded, IDS), expected) < 6e-2


def test_dummy_weights_are_kept_as_the_folders() -> None:
    model = load_model(FOLDER, load_format="dummy")
    assert model.weight_bytes == load_model(FOLDER).weight_bytes
    assert np.isfinite(logits_of(model, IDS)).all()


def spoilt(folder: Path, **changes: Array | None) -> Path:
    """A copy whose tensors of the second layer's experts are replaced, or left out."""
    tensors = stored()
    for name, array in changes.items():
        if array is None:
            del tensors[f"{UNDER}.{name}"]
        else:
            tensors[f"{UNDER}.{name}"] = array
    folder.mkdir()
    shutil.copy(FOLDER / "config.json", folder / "config.json")
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    tensors = {name.removeprefix(f"{UNDER}."): array for name, array in stored().items()}
    blocks, scales = tensors["gate_up_proj_blocks"], tensors["gate_up_proj_scales"]
    nan = scales.copy()
    nan[1, 2, 0] = 255
    cases: list[tuple[dict[str, Array | None], str]] = [
        ({"gate_up_proj_blocks": blocks.view(np.int8)}, "gate_up_proj_blocks' is I8, must be U8"),
        ({"gate_up_proj_blocks": blocks.reshape(3, 128, 32)}, r"blocks' is \[3, 128, 32\], must be \[any, any, any"),
        ({"gate_up_proj_scales": scales[:2]}, r"gate_up_proj_scales' is \[2, 128, 2\], must be \[3, 128, 2\]"),
        ({"gate_up_proj_scales": None}, f"has no scales: tensor '{UNDER}.gate_up_proj_scales' is missing"),
        ({"gate_up_proj_scales": nan}, r"gate_up_proj_scales' has the scale nan at \[130, 0\]; scales must be finite"),
        (
            {"gate_up_proj_blocks": blocks[:2], "gate_up_proj_scales": scales[:2]},
            rf"1 tensor does not fit.*'{UNDER}.gate_up_proj' is \[2, 64, 128\], but the config asks for \[3, 64, 128\]",
        ),
        (
            {"gate_up_proj_blocks": None, "gate_up_proj_scales": None, "gate_up_proj_bias": None},
            rf"2 tensors do not fit.*'{UNDER}.gate_up_proj' \[3, 64, 128\] is missing.*gate_up_proj_bias' \[3, 128\]",
        ),
        ({"down_proj_bias": tensors["down_proj_bias"][:, :63]}, r"down_proj_bias' is \[3, 63\], but the config asks"),
        ({"0.gate_proj.bias": np.zeros(64, np.float32)}, r"gate_proj.bias' is stored in '.*gate_up_proj_bias', too"),
        ({"extra_blocks": blocks}, "extra_blocks' has no scales"),
    ]  # fmt: skip
    for number, (changes, message) in enumerate(cases):
        with pytest.raises(WeightsError, match=f"(?s){message}"):
            load_model(spoilt(tmp_path / str(number), **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swiglu_limit": 10.0}, "swiglu_limit = 10.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
        ({"rope_parameters": None}, "rope_parameters is missing"),  # absent, it is its class's
        ({"experts_per_token": 4}, "experts_per_token = 4"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok = 4 must be at most num_local_experts = 3"),
        ({"quantization_config": {"quant_method": "mxfp4", "bits": 4}}, "bits = 4 is not supported for quant"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = change_config(Path(shutil.copytree(FOLDER, tmp_path / "model")), **changes)
    with pytest.raises(ConfigError, match=words):
        load_model(folder)
