"""int8 weights in whole models, against the same models with their weights rounded to int8's grid by numpy.

What is left to differ is the rounding of activations, by up to half a 64th of the largest in each group. Where numpy
rounds them, too, nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.base import Model
from models.registry import load_model
from runtime import ops
from runtime.bench.scheduling.exact import bench_exact, engine_maker
from runtime.dtype import bfloat16, float32
from runtime.engine.make_engine import build_engine
from runtime.errors import InvalidArgumentError
from runtime.linear.format import INT8
from runtime.ops import LinearWeight
from runtime.tensor.tensor import Tensor
from tests.models.driver import Array, logits_of, relative_error
from tests.models.folders import Golden, golden_tensors, load_golden, write_model, write_safetensors
from tests.models.products import products_by
from tests.oracles import int8

CASES = (  # tied or not, with biases or not, stored [outputs, inputs] or GPT-2's way, depths that are no whole groups
    "gpt2_gelu_new",
    "gpt2_gelu_erf",
    "llama_default",
    "llama_tied_gqa4",
    "qwen2_tied",
    "qwen3_gqa2_linear",
)


def on_the_grid(matrix: Array, axis: int) -> Array:
    """float32 values `q * scale` with integers `|q| <= 127` and one scale an output channel; `axis` is the inputs'."""
    scale = np.abs(matrix).max(axis, keepdims=True) / np.float32(127)
    return np.rint(matrix / np.where(scale > 0, scale, 1)).astype(np.int8) * scale


def rounded_model(folder: Path, golden: Golden) -> Model:
    """The case in float32 with every matrix of a linear map on int8's grid."""
    tensors = golden_tensors(golden)
    is_untied = "lm_head.weight" in tensors
    for name, array in tensors.items():
        is_table = "wpe" in name or (is_untied and ("wte" in name or "embed_tokens" in name))
        if array.ndim == 2 and not is_table:
            tensors[name] = on_the_grid(array, 0 if ".c_" in name else 1)
    write_model(folder, golden)
    write_safetensors(folder / "model.safetensors", tensors)
    return load_model(folder)


def dynamic_quantisation(x: Tensor) -> Tensor:
    """Activations `[T, K]` on the grid that a product with int8 weights puts them on."""
    groups = [integers * scales[:, None] for integers, scales, _ in int8.groups(x.array)]
    return Tensor.from_numpy(np.concatenate(groups, 1).astype(np.float32))


def both_ways(model: Model, golden: Golden) -> list[Array]:
    """Logits of the prompt at once, and token by token."""
    ids = golden.prompt_ids
    return [logits_of(model, ids), logits_of(model, ids, [len(ids) - 6, *[1] * 6], block_size=8, seed=1)]


@pytest.mark.parametrize("case", CASES)
def test_equals_the_model_whose_weights_lie_on_the_grid(tmp_path: Path, case: str) -> None:
    golden = load_golden(case)
    quantised = load_model(write_model(tmp_path / "int8", golden), quantization="int8")
    assert (quantised.quantization, quantised.dtype) == ("int8", float32)
    rounded = rounded_model(tmp_path / "grid", golden)
    for ours, theirs in zip(both_ways(quantised, golden), both_ways(rounded, golden), strict=True):
        assert relative_error(ours, theirs) <= 3.5e-2  # of the largest logit


@pytest.mark.parametrize("case", CASES)
def test_each_product_is_that_of_activations_on_the_grid(tmp_path: Path, case: str) -> None:
    """One by one, since a single rounding to the other side moves all that follows by a hundredth."""
    golden = load_golden(case)
    quantised = load_model(write_model(tmp_path / "int8", golden), quantization="int8")
    weights: list[LinearWeight] = []
    errors: list[float] = []

    def noted(op: Callable[..., Tensor], x: Tensor, weight: LinearWeight, *more: Any, **rest: Any) -> Tensor:
        weights.append(weight)
        return op(x, weight, *more, **rest)

    def compared(op: Callable[..., Tensor], x: Tensor, weight: LinearWeight, *more: Any, **rest: Any) -> Tensor:
        assert weight.format.name == "int8"
        expected = op(dynamic_quantisation(x), weights.pop(0), *more, **rest)
        result = op(x, weight, *more, **rest)
        errors.append(relative_error(result.numpy(), expected.numpy()))
        return result

    with products_by(noted):
        both_ways(rounded_model(tmp_path / "grid", golden), golden)
    with products_by(compared):
        both_ways(quantised, golden)
    assert len(errors) >= 8 * quantised.config.num_layers
    assert weights == []
    assert max(errors) <= 1e-5


@pytest.mark.parametrize("case", ["gpt2_gelu_new", "qwen3_tied_gqa4"])
def test_a_tied_table_is_stored_once_and_read_from_the_grid(tmp_path: Path, case: str) -> None:
    golden = load_golden(case)
    model: Any = load_model(write_model(tmp_path, golden), quantization="int8")
    table = model.wte if case.startswith("gpt2") else model.embed_tokens
    assert table is model.lm_head.weight
    assert table.format is INT8
    (stored,) = (array for name, array in golden_tensors(golden).items() if "wte" in name or "embed_tokens" in name)
    ids = np.arange(stored.shape[0], dtype=np.int32)[::-1].copy()
    rows = ops.embedding(Tensor.from_numpy(ids), table).numpy()
    np.testing.assert_allclose(rows, on_the_grid(stored, 1)[ids], rtol=1e-6, atol=0)


def test_an_untied_table_stays_as_it_is(tmp_path: Path) -> None:
    golden = load_golden("llama_default")
    model: Any = load_model(write_model(tmp_path, golden, "BF16"), quantization="int8")
    assert isinstance(model.embed_tokens, Tensor)
    assert model.embed_tokens.dtype is bfloat16
    assert model.lm_head.format is INT8
    assert model.kv_cache_spec(16).dtype is bfloat16


def test_weight_bytes_are_those_of_int8(tmp_path: Path) -> None:
    """The bundled model's, which are nearly all in matrices: about half of bfloat16's."""
    plain, quantised = (build_engine(device="cpu", num_blocks=64, quantization=each).info for each in ("none", "int8"))
    assert (plain.quantization, quantised.quantization) == ("none", "int8")
    assert plain.dtype == quantised.dtype == "bfloat16"
    assert plain.kv_cache_bytes == quantised.kv_cache_bytes
    assert 0.45 * plain.weight_bytes < quantised.weight_bytes < 0.6 * plain.weight_bytes


def test_schedules_do_not_change_a_bit() -> None:
    make = engine_maker({"device": "cpu", "seed": 0, "quantization": "int8"}, exact=True)
    assert make({"max_model_len": 64, "num_blocks": 64}).info.quantization == "int8"
    report = bench_exact(make, make, num_requests=12, num_schedules=6, num_rounds=0, max_model_len=64)
    assert [(row["name"], row["first"]) for row in report["schedules"] if row["num_different"]] == []
    assert report["is_exact"]


def test_an_unknown_name_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for load in (load_model, build_engine):
        with pytest.raises(InvalidArgumentError, match="int3") as caught:
            load(tmp_path, quantization="int3")  # type: ignore[operator]
        assert caught.value.param == "quantization"
