"""Twenty models of `tools/comparing/fuzz_models.py`, with transformers' answers kept; and new ones, beside it.

They are of every family, and of odd sizes; engines are tight.

    python tools/comparing/fuzz_models.py --peer-python PYTHON --num 20 --write-goldens tests/models/fuzzed
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

from models.families import known_architectures
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers.rounds import TRANSFORMERS
from tests.models.folders import write_safetensors
from tests.models.golden_weights import golden_tensor
from tests.models.vision import gemma4_cases
from tests.models.vision.cases import SEED, load_golden, write_golden
from tools.comparing.fuzzing.cases import POOLED, classes_of, families
from tools.comparing.fuzzing.check import check
from tools.comparing.fuzzing.check_forward import WAYS, check_forward
from tools.comparing.fuzzing.latent_families import LATENT
from tools.comparing.fuzzing.picture_families import GEMMA4
from tools.comparing.fuzzing.state_families import STATES

FOLDER = Path(__file__).parent / "fuzzed"
ROOT = Path(__file__).resolve().parents[2]
KEPT = json.loads((FOLDER / "cases.json").read_text())
NAMES = [f"{index}_{kept['case']['family']}" for index, kept in enumerate(KEPT)]
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def write_kept(folder: Path, index: int) -> dict[str, Any]:
    """The oracle's folder of a kept case, its weights made again; the case."""
    kept = KEPT[index]
    (folder / "config.json").write_text(json.dumps(kept["config"]))
    case: dict[str, Any] = kept["case"]
    tensors = {
        name: golden_tensor(name, tuple(shape), case["weights"]).astype(_NUMPY[case["dtype"]])
        for name, shape in kept["shapes"].items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    with np.load(FOLDER / "oracle.npz") as stored:
        own = {name.removeprefix(f"{index}_"): stored[name] for name in stored if name.startswith(f"{index}_")}
    np.savez(folder / "oracle.npz", **own)
    return case


def failures_of(folder: Path, index: int, device: str) -> list[str]:
    case = write_kept(folder, index)
    runs = [run for run in case["runs"] if run["device"].startswith(device)]
    assert runs
    findings = check({**case, "runs": runs}, folder, KEPT[index]["noise"])
    assert findings.covered[case["family"]] == 1  # nothing was left out
    return findings.failures


@pytest.mark.parametrize("index", range(len(KEPT)), ids=NAMES)
def test_cpu(tmp_path: Path, index: int) -> None:
    assert failures_of(tmp_path, index, "cpu") == []


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("index", range(len(KEPT)), ids=NAMES)
def test_emulated(tmp_path: Path, index: int) -> None:
    assert failures_of(tmp_path, index, "emulated") == []


def test_forward_alone(tmp_path: Path) -> None:
    """`--forward` finds nothing, or that logits are of another prompt."""
    case = {**write_kept(tmp_path, 4), "runs": [{"device": "cpu", "block_size": 8}]}
    assert check_forward(case, tmp_path, 0.0).failures == []
    first, second = case["prompts"]
    spoilt = {**case, "prompts": [[*first[:-1], first[-1] ^ 1], second]}
    said = check_forward(spoilt, tmp_path, 0.0).failures
    assert [each.rpartition(":")[0] for each in said] == [f"cpu: prompt 0 {way}" for way in WAYS]


@pytest.mark.parametrize("name", gemma4_cases.CASES)
def test_forward_alone_with_pictures(tmp_path: Path, name: str) -> None:
    """Its chunks cut them only where their tokens do not see each other."""
    ids, firsts = gemma4_cases.prompt_of(name)
    write_golden(tmp_path, name, gemma4_cases.CASES[name])
    np.savez(tmp_path / "oracle.npz", logits_0=load_golden(name).arrays["logits"])
    case = {
        "family": "gemma4_vision", "fields": gemma4_cases.CASES[name], "dtype": "float32", "weights": SEED,
        "prompts": [ids], "runs": [{"device": "cpu", "block_size": 8}],
        "pictures": {"grids": gemma4_cases.GRIDS, "firsts": firsts},
    }  # fmt: skip
    assert check_forward(case, tmp_path, 0.0).failures == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [*STATES, *GEMMA4, *LATENT, *POOLED])
def test_sixty_of_each_newer_family(family: str) -> None:
    """In float32, with transformers beside them: forward passes alone on the cpu and on emulated devices, encoders on
    some of these."""
    try:
        python = TRANSFORMERS.python(None, ROOT)
    except BenchmarkError as error:  # which has the command that makes one
        pytest.skip(str(error))
    options = ["--family", family, "--num", "60", "--no-shrink"]
    options += ["--dtype", "float32", "--emulated-share", "0.1"] if family in POOLED else ["--forward"]
    command = [sys.executable, str(ROOT / "tools/comparing/fuzz_models.py"), "--peer-python", str(python), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_architecture_is_compared_with_transformers() -> None:
    """Where it has a class of it: InternLM 2 has none, and InternLM 3 is saved as Llama. Heads that only train are
    not read."""
    compared = {classes_of(family)[1] for family in (*families(), *POOLED)}
    known = {name for name in known_architectures() if not name.endswith(("ForMaskedLM", "ForPreTraining"))}
    assert known - compared == {"InternLM2ForCausalLM", "InternLM3ForCausalLM"}
