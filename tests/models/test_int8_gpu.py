"""int8 weights in whole models on emulated GPUs, against models whose weights lie on int8's grid.

Activations stay as they are there: in float32 nothing differs but the order of sums; in bfloat16 what rounding moves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.registry import load_model
from runtime import ops
from runtime.dtype import bfloat16
from runtime.engine.make_engine import build_engine
from runtime.errors import InvalidArgumentError
from runtime.linear.format import INT8
from runtime.linear.weight import PackedWeight
from runtime.tensor.tensor import Tensor
from tests.models.driver import logits_of, relative_error
from tests.models.folders import golden_tensors, load_golden, write_model
from tests.models.test_int8 import CASES, rounded_model
from tests.oracles import int8

pytestmark = pytest.mark.emulator

TELLING = [("emulated:sm_90a", "BF16", "llama_default", False)]
"""Run each time, in chunks alone: the kernels of a whole prompt differ in their tiles."""
OTHERS = [
    (f"emulated:{arch}", stored, case, True)
    for arch in ("sm_80", "sm_89", "sm_90a") for stored in ("BF16", "F32") for case in CASES
]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "stored", "case", "is_whole_too"),
    [*TELLING, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in OTHERS)],
)
@pytest.mark.exhaustive
def test_equals_the_model_whose_weights_lie_on_the_grid(
    tmp_path: Path, device: str, stored: str, case: str, is_whole_too: bool
) -> None:
    golden = load_golden(case)
    folder = write_model(tmp_path / "int8", golden, stored)
    model: Any = load_model(folder, device=device, quantization="int8")
    assert isinstance(model.lm_head.weight, PackedWeight)
    assert model.lm_head.format is INT8
    twin = rounded_model(tmp_path / "grid", golden)
    ids = golden.prompt_ids
    expected = logits_of(twin, ids)
    tolerance = 1e-4 if stored == "F32" else 3e-2  # bfloat16 loses 2e-2 without int8, too
    if is_whole_too:
        assert relative_error(logits_of(model, ids), expected) <= tolerance
    assert relative_error(logits_of(model, ids, [len(ids) - 6, *[1] * 6], block_size=8, seed=1), expected) <= tolerance


@pytest.mark.exhaustive
def test_exact_mode_holds(tmp_path: Path) -> None:
    """The same bits in any chunks; nothing lost."""
    golden = load_golden("qwen2_tied")
    folder, ids = write_model(tmp_path / "int8", golden, "BF16"), golden.prompt_ids
    model = load_model(folder, device="emulated:sm_90a", quantization="int8", exact=True)
    logits = logits_of(model, ids, exact=True)
    assert relative_error(logits, logits_of(rounded_model(tmp_path / "grid", golden), ids)) <= 3e-2
    np.testing.assert_array_equal(logits_of(model, ids, [3, 1, len(ids) - 4], block_size=8, exact=True), logits)


def test_an_engine_says_what_it_keeps() -> None:
    options: dict[str, Any] = {"device": "emulated:sm_90a", "num_blocks": 64, "dtype": "bfloat16"}
    plain, packed = (build_engine(**options, quantization=each).info for each in ("none", "int8"))
    assert (plain.quantization, packed.quantization) == ("none", "int8")
    assert 0.45 * plain.weight_bytes < packed.weight_bytes < 0.65 * plain.weight_bytes


def test_a_library_that_reads_no_packed_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="gemm is 'cublas', which reads no weights in int8") as caught:
        load_model(tmp_path, device="emulated:sm_80", quantization="int8", gemm="cublas")
    assert caught.value.param == "gemm"


def test_a_tied_table_is_looked_up_from_the_packed_matrix(tmp_path: Path) -> None:
    golden = load_golden("qwen3_tied_gqa4")
    model: Any = load_model(write_model(tmp_path, golden, "BF16"), device="emulated:sm_90a", quantization="int8")
    assert model.embed_tokens is model.lm_head.weight
    stored = golden_tensors(golden, "BF16")["model.embed_tokens.weight"].astype(np.float32)
    ids = np.arange(stored.shape[0], dtype=np.int32)[::-1].copy()
    rows = ops.embedding(Tensor.from_numpy(ids).to("emulated:sm_90a"), model.embed_tokens).to("cpu")
    assert rows.dtype is bfloat16
    integers, scales = int8.weight(stored)
    np.testing.assert_allclose(rows.numpy().astype(np.float32), (integers * scales[:, None])[ids], rtol=2**-8, atol=0)
