"""A `LogitsKernel` on an emulated GPU, beside the same function in Python; and one that cannot run."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import LLM, LogitsKernel, ops
from runtime.device.device import Device
from runtime.engine.errors import RequestError
from runtime.tensor.tensor import Tensor
from tests.runtime.engine.logits.cases import MODEL


def shifted(token, logits, prompt_ids, num_prompt, output_ids, num_output, numbers):
    value = logits[token]
    for i in range(num_prompt):
        if prompt_ids[i] == token:
            value = value - numbers[0]
    for i in range(num_output):
        if output_ids[i] == token:
            value = value * numbers[1]
    return value


def no_kernel(token, logits, prompt_ids, num_prompt, output_ids, num_output, numbers):
    return sorted({token: "text"})[logits]


PROMPT, OUTPUT = np.array([3, 300, 3, 511], np.int32), np.array([300, 7], np.int32)
NUMBERS = np.array([0.5, -2.0], np.float32)
VOCAB = 700


@pytest.mark.parametrize("device", ["cpu", "emulated:sm_90a"])
@pytest.mark.parametrize("num_output", [0, 2])
def test_a_kernel_is_its_function(device: str, num_output: int) -> None:
    given = np.random.default_rng(1).standard_normal((3, VOCAB)).astype(np.float32)
    logits = Tensor.from_numpy(given.copy()).to(Device.parse(device))
    output = OUTPUT[:num_output]
    ops.process_logits(logits, 1, PROMPT, output, NUMBERS, shifted)
    found = logits.to("cpu").array
    wanted = [shifted(token, given[1], PROMPT, len(PROMPT), output, len(output), NUMBERS) for token in range(VOCAB)]
    assert np.array_equal(found[1], np.array(wanted, np.float32))
    assert np.array_equal(found[[0, 2]], given[[0, 2]])


@pytest.mark.parametrize("device", ["cpu", "emulated:sm_90a"])
def test_a_kernel_that_does_not_compile(device: str) -> None:
    with pytest.raises(RequestError, match=rf"test_kernels:no_kernel does not run on {device}: \w+"):
        LLM(
            MODEL, logits_processors=[LogitsKernel(no_kernel)], device=device, dtype="float32", max_model_len=32,
            compile_ahead=False, skip_tokenizer_init=True,
        )  # fmt: skip
