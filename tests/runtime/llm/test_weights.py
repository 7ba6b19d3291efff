"""`LLM` on other weights: from a folder, from arrays of numpy and of DLPack, and from a trainer's shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from models.checkpoints.given_weights import SHARED_FOLDER, write_shared
from models.errors import WeightsError
from runtime import LLM, SamplingParams
from runtime.engine.errors import RequestError
from runtime.errors import InvalidArgumentError
from runtime.tensor.tensor import Tensor
from tests.models.folders import golden_tensors, load_golden
from tests.runtime.engine.weights.two_models import write_pair

CASE = "qwen3_odd"
IDS = [5, 9, 2, 44, 17]
ROOT = Path(__file__).parents[3]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

_TRAINER = """
import os, sys, time
from pathlib import Path
from models.checkpoints import given_weights, safetensors_file
from tests.models.folders import golden_tensors, load_golden
golden = load_golden(sys.argv[1])
path = Path(sys.argv[2])
def arrays(all):
    for number, each in enumerate(all):
        if number == 3:
            print("writing", flush=True)
            time.sleep(1000)
        yield each
plain = safetensors_file.write_tensors
given_weights.write_tensors = lambda path, plan, found, metadata: plain(path, plan, arrays(found), metadata)
given_weights.write_shared(path, golden_tensors(golden))
"""
"""A trainer that is killed while it writes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("weights"), CASE)


@pytest.fixture
def llm(folders: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(folders[0], device="cpu", max_model_len=64, compile_ahead=False) as made:
        yield made


def answered(llm: LLM) -> tuple[list[int], str | None]:
    (output,) = llm.generate([IDS], PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids, output.outputs[0].weight_version


def test_update_weights(llm: LLM, folders: tuple[Path, Path]) -> None:
    before = answered(llm)
    assert before[1] == llm.weight_version == "0"
    with LLM(folders[1], device="cpu", max_model_len=64, compile_ahead=False) as other:
        wanted = answered(other)[0]
    assert wanted != before[0]
    llm.update_weights(folders[1])
    assert answered(llm) == (wanted, "1")
    golden = load_golden(CASE)
    old = golden_tensors(golden)
    new = golden_tensors(type(golden)(**{**vars(golden), "seed": golden.seed + 1}))
    llm.update_weights(old)
    assert answered(llm) == (before[0], "2")
    exported = {name: Tensor.from_numpy(each) for name, each in new.items()}  # as torch's tensors are
    llm.update_weights(exported.items(), weight_version="step 7")
    assert answered(llm) == (wanted, "step 7")
    with pytest.raises(RequestError, match="no number"):
        llm.update_weights(old)
    descriptor = os.memfd_create("weights")  # inherited from a trainer, say
    write_shared(Path(f"/proc/self/fd/{descriptor}"), old)
    llm.update_weights(shared_memory=descriptor, weight_version="8")
    assert answered(llm) == (before[0], "8")
    os.close(descriptor)
    for wrong in ({"weights": old, "shared_memory": "a"}, {}, {"shared_memory": descriptor}, {"shared_memory": "../x"}):
        with pytest.raises(InvalidArgumentError):
            llm.update_weights(**wrong)  # type: ignore[arg-type]
    for given in ({}, {"a": np.array(["text"])}, [("a", old), ("a", old)], {"": np.ones(1, np.float32)}, {"a": 7}):
        with pytest.raises(InvalidArgumentError):
            llm.update_weights(given)  # type: ignore[arg-type]
    assert answered(llm) == (before[0], "8")


def test_sleep_and_pause(llm: LLM) -> None:
    before = answered(llm)
    for level in (0, 1, 2):
        assert llm.sleep(level).sleep_level == level
        assert llm.is_sleeping() == (level > 0)
        llm.wake_up()
        assert not llm.is_sleeping()
        assert answered(llm) == before
    llm.pause_generation("wait")
    assert llm.is_paused()
    llm.resume_generation()
    assert answered(llm) == before


def test_trainer_that_is_killed(llm: LLM) -> None:
    """Weights of which only a part was written are refused."""
    before = answered(llm)
    path = SHARED_FOLDER / f"xserv-test-{os.getpid()}"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        command = [sys.executable, "-c", _TRAINER, CASE, str(path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "writing\n"
            trainer.send_signal(signal.SIGKILL)
        with pytest.raises(WeightsError):
            llm.update_weights(shared_memory=path.name)
    finally:
        path.unlink()
    assert answered(llm) == before
