"""Random adapters of `tools/comparing/fuzz_adapters.py`, with PEFT's answers kept; engines are tight.

python tools/comparing/fuzz_adapters.py --peer-python PYTHON --num 12 --write-goldens tests/models/fuzzed_adapters
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.rounds import TRANSFORMERS
from tests.models.folders import write_safetensors
from tests.models.golden_weights import golden_tensor
from tools.comparing.fuzzing.adapter_tensors import adapter_tensor
from tools.comparing.fuzzing.check_adapters import check_adapters
from tools.comparing.fuzzing.stored_models import store

FOLDER = Path(__file__).parent / "fuzzed_adapters"
ROOT = Path(__file__).resolve().parents[2]
KEPT = json.loads((FOLDER / "cases.json").read_text())
NAMES = [f"{index}_{kept['case']['family']}_{kept['case']['stored']}" for index, kept in enumerate(KEPT)]
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def write_kept(folder: Path, index: int) -> dict[str, Any]:
    """The oracle's folder of a kept case, weights and adapters made again; the case."""
    kept = KEPT[index]
    case: dict[str, Any] = {**kept["case"], "fields": kept["config"]}
    (folder / "config.json").write_text(json.dumps(kept["config"]))
    tensors = {
        name: golden_tensor(name, tuple(shape), case["weights"]).astype(_NUMPY[case["dtype"]])
        for name, shape in kept["shapes"].items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    served, _ = store(folder, case["stored"])
    for number, (adapter, config, answer) in enumerate(
        zip(case["adapters"], kept["adapter_configs"], kept["adapters"], strict=True)
    ):
        own = folder / f"adapter_{number}"
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps(config))
        made = {}
        for name, shape in answer["shapes"].items():
            found = adapter_tensor(name, tuple(shape), adapter, case["weights"])
            if found is None:  # a copy of the model's table
                table = next(each for each in tensors if each.endswith(("embed_tokens.weight", "wte.weight")))
                found = tensors[table].astype(np.float32)
            made[name] = found
        write_safetensors(own / "adapter_model.safetensors", made)
    with np.load(FOLDER / "oracle.npz") as stored:
        own_arrays = {name.removeprefix(f"{index}_"): stored[name] for name in stored if name.startswith(f"{index}_")}
    np.savez(folder / "adapted.npz", **own_arrays)
    return {**case, "served": str(served)}


def failures_of(folder: Path, index: int, device: str) -> list[str]:
    case = write_kept(folder, index)
    runs = [run for run in case["runs"] if run["device"].startswith(device)]
    assert runs
    findings = check_adapters({**case, "runs": runs}, folder, KEPT[index]["adapters"], KEPT[index]["noise"])
    assert findings.covered["adapters made"] == len(case["adapters"])
    assert findings.covered["pairs of low rank"] > 0
    return findings.failures


@pytest.mark.parametrize("index", range(len(KEPT)), ids=NAMES)
def test_cpu(tmp_path: Path, index: int) -> None:
    assert failures_of(tmp_path, index, "cpu") == []


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("index", [index for index in range(len(KEPT)) if index % 2])
def test_emulated(tmp_path: Path, index: int) -> None:
    assert failures_of(tmp_path, index, "emulated") == []


@pytest.mark.exhaustive
def test_sixty_models_beside_peft() -> None:
    """Each with two adapters; some on emulated devices, too."""
    try:
        python = TRANSFORMERS.python(None, ROOT)
    except BenchmarkError as error:  # which has the command that makes one
        pytest.skip(str(error))
    command = [sys.executable, str(ROOT / "tools/comparing/fuzz_adapters.py"), "--peer-python", str(python)]
    done = subprocess.run([*command, "--num", "60"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
