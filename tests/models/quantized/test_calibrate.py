"""Calibration: the folds leave a model in floats what it was, and a quantised one nearer to it on the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from models.checkpoints.hub import BUNDLED_MODEL
from models.checkpoints.model_files import open_model
from models.checkpoints.safetensors_file import SafetensorsFile
from models.errors import ModelLoadError
from models.families import known_architectures
from models.quantized.calibrate import calibrate
from models.quantized.write import quantize_folder
from models.registry import load_config, load_model, quantisable_matrices
from runtime.cli import app
from runtime.errors import InvalidArgumentError
from runtime.linear.quantise import Rounding
from tests.models.driver import logits_of, relative_error
from tests.models.folders import load_golden, write_model, write_safetensors

IDS = np.random.default_rng(0).integers(0, 60, 512).tolist()


@pytest.fixture
def few_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.quantized.calibrate.POWERS", (0.0, 0.5))


def tensors_of(folder: Path) -> dict[str, Any]:
    checkpoint = open_model(folder).checkpoint()
    return {name: checkpoint[name].array().copy() for name in checkpoint.tensors}


def with_outliers(folder: Path, num: int = 3) -> None:
    """Some channels of each norm's output, and of the values and of `up`, are 60 times as large, and the maps behind
    them as much smaller: the same function."""
    tensors = tensors_of(folder)
    for name in list(tensors):
        if name.endswith("layernorm.weight") and "layers" in name:
            tensors[name][:num] *= 60
            behind = ("q_proj", "k_proj", "v_proj") if "input" in name else ("gate_proj", "up_proj")
            layer = name.rpartition(".layers.")[0] + ".layers." + name.split(".layers.")[1].split(".")[0]
            for other in tensors:
                if other.startswith(f"{layer}.") and other.endswith(tuple(f"{each}.weight" for each in behind)):
                    tensors[other][:, :num] /= 60
    write_safetensors(folder / "model.safetensors", tensors)


@pytest.mark.usefixtures("few_powers")
@pytest.mark.parametrize(
    ("case", "num_maps"),
    [
        ("qwen2_tied", 4), ("phi3_longrope_short", 4), ("gemma2_odd", 2),
        pytest.param("llama_tied_gqa4", 4, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_tied_gqa4", 4, marks=pytest.mark.exhaustive),
        pytest.param("granite_multipliers", 4, marks=pytest.mark.exhaustive),
        pytest.param("olmo3_windows", 2, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_floats_stay_what_they_are(tmp_path: Path, case: str, num_maps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fold that the family has is taken, its scales multiplied and divided in float32: the same logits."""
    monkeypatch.setattr("models.quantized.calibrate._least", lambda losses: 0.5)
    folder = write_model(tmp_path / case, load_golden(case))
    config, files = load_config(folder), open_model(folder)
    checkpoint = files.checkpoint()
    _, matrices = quantisable_matrices(folder, checkpoint)
    stored = {name: checkpoint.tensors[name].name for name in checkpoint.tensors}
    rounding = Rounding("int4", (1, 0), np.dtype(np.float32))
    model_class = known_architectures()[config.architecture].model_class
    shown: list[tuple[int, int]] = []
    folded = calibrate(
        config, model_class, checkpoint, IDS, lambda name: rounding if name in matrices else None,
        lambda done, total: shown.append((done, total)),
    )  # fmt: skip
    total = num_maps * config.num_layers
    assert shown == [(done, total) for done in range(total + 1)]
    assert len(folded.gains) == total
    assert len(folded.columns) >= total
    values = {name: checkpoint[name].array().astype(np.float32) for name in checkpoint.tensors}
    changed = {name: folded.vectors.get(name, folded.apply(name, array)) for name, array in values.items()}
    assert any(not np.array_equal(changed[name], values[name]) for name in values)
    before = logits_of(load_model(folder, dtype="float32"), IDS[:24])
    write_safetensors(folder / "model.safetensors", {stored[name]: array for name, array in changed.items()})
    assert relative_error(logits_of(load_model(folder, dtype="float32"), IDS[:24]), before) < 1e-4


def test_what_is_written_loses_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels with outliers cost a quantised model much, a calibrated one a fraction of it; config and tensors have
    the same names, types and shapes, so that nobody who reads them needs to know."""
    monkeypatch.setattr("models.quantized.calibrate.POWERS", (0.0, 0.4, 0.6, 0.8))
    source = write_model(tmp_path / "source", load_golden("llama_tied_gqa4"))
    with_outliers(source)
    dense = logits_of(load_model(source), IDS[:64])
    lost = {}
    for name, calibration in (("plain", None), ("calibrated", IDS)):
        written = quantize_folder(source, tmp_path / name, "int4-g32", calibration=calibration)
        assert written.num_quantised > written.num_kept
        assert bool(written.gains) == (calibration is not None)
        logits = logits_of(load_model(tmp_path / name, dtype="float32"), IDS[:64])
        lost[name] = float(np.square(logits - dense).mean())
    assert lost["calibrated"] < 0.6 * lost["plain"]
    plain, calibrated = (
        {
            name: (entry.dtype, entry.shape)
            for name, entry in SafetensorsFile(tmp_path / folder / "model.safetensors").tensors.items()
        }
        for folder in lost
    )
    assert plain == calibrated
    assert (tmp_path / "plain/config.json").read_text() == (tmp_path / "calibrated/config.json").read_text()


def test_what_cannot_be_calibrated(tmp_path: Path) -> None:
    source, target = write_model(tmp_path / "source", load_golden("llama_tied_gqa4")), tmp_path / "target"
    for format in ("fp8", "int8"):
        with pytest.raises(InvalidArgumentError, match=f"calibration is for int4, int4-g32 and mxfp4: {format} rounds"):
            quantize_folder(source, target, format, calibration=IDS)
    with pytest.raises(InvalidArgumentError, match="calibration: the text has 5 tokens, must have at least"):
        quantize_folder(source, target, "int4-g32", calibration=IDS[:5])
    gpt2 = write_model(tmp_path / "gpt2", load_golden("gpt2_gelu_new"))
    with pytest.raises(ModelLoadError, match="stores its maps inputs first, which is not quantised"):
        quantize_folder(gpt2, target, "int4-g32", calibration=IDS)
    assert not target.exists()


@pytest.mark.usefixtures("few_powers")
def test_the_command(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("<|user|>What is 17 plus 25?<|end|><|assistant|>42<|end|>" * 40)
    command = ["quantize", str(BUNDLED_MODEL), str(out), "--format", "mxfp4", "--calibration", str(text)]
    done = CliRunner().invoke(app, [*command, "--calibration-tokens", "300"])
    assert done.exit_code == 0, done.output
    assert "out: 28 matrices in mxfp4; " in done.output
    assert "on the text 16 maps lose " in done.output
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "mxfp4-pack-quantized"
    text.write_bytes(b"\xff\xfe")
    assert CliRunner().invoke(app, command).exit_code == 2
