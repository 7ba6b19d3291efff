"""Engines whose KV pages are of int8 and fp8: close to pages of float32, and the same under every schedule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from models.registry import load_model
from numba_kernels.latent_rows import LatentBytes
from runtime.bench.scheduling.engines import local
from runtime.bench.scheduling.exact import SCHEDULES, bench_exact, engine_maker
from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine, describe_engine
from runtime.engine.messages import EngineInfo
from runtime.errors import InvalidArgumentError
from runtime.kv.forms import Latent
from tests.models.driver import logits_of
from tests.models.folders import load_golden, write_model

IDS = np.random.default_rng(0).integers(0, 97, 90).tolist()


@pytest.mark.parametrize(("name", "chunks"), [("llama_tied_gqa4", None), ("qwen3_tied_gqa4", [50, 1, 39])])
def test_models_are_close_to_what_they_are_with_pages_of_floats(name, chunks, tmp_path):
    """The weights are random, so that logits lose more than a trained model's do."""
    folder = write_model(tmp_path, load_golden(name))
    exact = logits_of(load_model(folder, device="cpu", dtype="float32"), IDS)
    errors = []
    for kind in ("bfloat16", "int8", "fp8"):
        model = load_model(folder, device="cpu", dtype="float32", kv_cache_dtype=kind)
        found = logits_of(model, IDS, chunks)
        errors.append(float(np.linalg.norm(found - exact) / np.linalg.norm(exact)))
    assert 0 < errors[0] < errors[1] < errors[2] < 0.05


def test_rows_of_latent_attention(tmp_path: Path) -> None:
    """fp8 is close to floats, bits depend on no chunk, and int8 is refused by name."""
    folder = write_model(tmp_path, load_golden("deepseek_v3_wide"))
    ids = [each % 61 for each in IDS]
    exact = logits_of(load_model(folder, device="cpu", dtype="float32"), ids)
    model = load_model(folder, device="cpu", dtype="float32", kv_cache_dtype="fp8")
    found = logits_of(model, ids)
    assert 1e-3 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.05
    np.testing.assert_array_equal(logits_of(model, ids, [50, 1, 39]), found)
    sizes = [
        describe_engine(folder, EngineConfig(device="cpu", num_blocks=64, kv_cache_dtype=kind)).kv_cache_bytes
        for kind in ("bfloat16", "fp8")
    ]
    form = model.kv_cache_spec(16).of_layer(0).form
    assert isinstance(form, Latent)
    rows = LatentBytes(form.width, form.num_values)
    assert sizes[1] * 2 * -(-form.width // 16) * 16 == sizes[0] * rows.row_bytes
    with pytest.raises(InvalidArgumentError, match=r"int8, must be one of .* use --kv-cache-dtype fp8") as refused:
        describe_engine(folder, EngineConfig(device="cpu", num_blocks=64, kv_cache_dtype="int8"))
    assert refused.value.param == "kv_cache_dtype"


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("emulated:sm_80", marks=[pytest.mark.exhaustive, pytest.mark.emulator])]
)
def test_layers_left_out_keep_the_type_of_the_weights(device: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, load_golden("llama_tied_gqa4"))

    def logits(kind: str, skipped: str) -> np.ndarray:
        model = load_model(
            folder, device=device, dtype="float32", kv_cache_dtype=kind, kv_cache_dtype_skip_layers=skipped
        )
        return logits_of(model, IDS, [50, 1, 39])

    exact, none, one = logits("auto", ""), logits("fp8", ""), logits("fp8", "0")
    count = load_model(folder, device=device, dtype="float32").config.num_layers
    np.testing.assert_array_equal(logits("fp8", ",".join(map(str, range(count)))), exact)
    assert np.linalg.norm(one - exact) > 0
    assert np.any(one != none)


def test_bytes_and_refusals_of_layers_left_out(tmp_path: Path) -> None:
    def info(model: Path | None, kind: str, skipped: str) -> EngineInfo:
        config = EngineConfig(
            device="cpu",
            num_blocks=64,
            kv_cache_dtype=kind,
            kv_cache_dtype_skip_layers=skipped,  # type: ignore[arg-type]
        )
        return describe_engine(model, config)

    whole, least, one = (info(None, *each).kv_cache_bytes for each in (("auto", ""), ("fp8", ""), ("fp8", "1")))
    num_layers = 4
    assert one - least == (whole - least) // num_layers
    windowed = write_model(tmp_path, load_golden("gemma2_odd"))
    for model, kind, skipped, words in (
        (None, "auto", "0", "'0', which needs kv_cache_dtype int8 or fp8"),
        (None, "fp8", "4", "has 4: layers are 0 to 3"),
        (None, "fp8", "first", "has 'first', must be numbers"),
        (None, "fp8", "sliding_window", "no layer has a window"),
        (windowed, "fp8", "sliding_window", "share the pages' memory with others"),
    ):
        with pytest.raises(InvalidArgumentError, match=words) as refused:
            info(model, kind, skipped)
        assert refused.value.param == "kv_cache_dtype_skip_layers"


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("device", "kind", "name", "dtype", "bound"),
    [
        ("emulated:sm_90a", "fp8", "llama_tied_gqa4", "float32", 5e-3),
        *(
            pytest.param(device, kind, name, dtype, bound, marks=pytest.mark.exhaustive)
            for device in ("emulated:sm_80", "emulated:sm_90a")
            for kind in ("int8", "fp8")
            for name, dtype, bound in (
                ("llama_tied_gqa4", "float32", 5e-3), ("gemma2_odd", "float32", 5e-3),
                ("gpt2_gelu_new", "float32", 5e-3),
                ("qwen3_tied_gqa4", "bfloat16", 5e-2),
            )
        ),
        *(
            pytest.param(device, "fp8", "deepseek_v3_wide", dtype, bound, marks=pytest.mark.exhaustive)
            for device in ("emulated:sm_80", "emulated:sm_90a")
            for dtype, bound in (("float32", 1e-2), ("bfloat16", 5e-2))
        ),
    ],
)  # fmt: skip
@pytest.mark.exhaustive
def test_a_gpu_gives_what_the_cpu_gives(device, kind, name, dtype, bound, tmp_path):
    """A sum that is rounded otherwise may take a number of a page to its neighbour, hence the bound."""
    folder, found = write_model(tmp_path, load_golden(name)), []
    ids = np.asarray(IDS) % json.loads((folder / "config.json").read_text())["vocab_size"]
    for each, as_type in (("cpu", "float32"), (device, dtype)):
        model = load_model(folder, device=each, dtype=as_type, kv_cache_dtype=kind)
        found.append(logits_of(model, ids.tolist(), [50, 1, 39]))
    assert np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0]) < bound


@pytest.mark.parametrize(
    ("device", "kind", "skipped", "num_requests"),
    [
        ("cpu", "fp8", "1", 48), ("cpu", "fp8", "latent", 48),
        pytest.param("cpu", "int8", "", 48, marks=pytest.mark.exhaustive),
        *(
            pytest.param(device, kind, skipped, 48, marks=[pytest.mark.exhaustive, pytest.mark.emulator])
            for device in ("emulated:sm_80", "emulated:sm_90a")
            for kind, skipped in (("int8", ""), ("fp8", "2"), ("fp8", "latent"))
        ),
    ],
)  # fmt: skip
def test_the_same_bits_under_every_schedule(
    device: str, kind: str, skipped: str, num_requests: int, tmp_path: Path
) -> None:
    """`skipped` "latent": a model with latent rows, of which no layer is left out."""
    pages = {"kv_cache_dtype": kind, "kv_cache_dtype_skip_layers": skipped}
    if skipped == "latent":
        pages = {"kv_cache_dtype": kind, "model": str(write_model(tmp_path, load_golden("deepseek_v2_odd")))}
    make = engine_maker({"device": device, "seed": 0, **pages}, exact=True)
    report = bench_exact(make, make, num_requests=num_requests, num_schedules=5, num_rounds=0, max_model_len=64)
    assert [(row["name"], row["first"]) for row in report["schedules"] if row["num_different"]] == []
    assert [row["name"] for row in report["schedules"]] == [each.name for each in SCHEDULES[:5]]
    assert sum(row["num_preemptions"] for row in report["schedules"]) >= 2


def test_bytes_are_those_of_the_planes() -> None:
    sizes = {}
    for kind in ("bfloat16", "int8", "fp8"):
        config = EngineConfig(device="cpu", num_blocks=64, kv_cache_dtype=kind)
        info = describe_engine(None, config)
        cache = local(build_engine(device="cpu", num_blocks=64, kv_cache_dtype=kind)).kv_cache
        planes = [plane.array for storage in cache.storages for plane in storage]
        assert info.kv_cache_bytes == sum(plane.nbytes for plane in planes)
        assert info.kv_cache_dtype == {"fp8": "float8_e4m3"}.get(kind, kind)
        sizes[kind] = info.kv_cache_bytes
    assert sizes["int8"] == sizes["fp8"] < 0.6 * sizes["bfloat16"]


def test_refusals() -> None:
    with pytest.raises(RequestError, match="kv_cache_dtype") as caught:
        EngineConfig(kv_cache_dtype="int4")  # type: ignore[arg-type]
    assert caught.value.param == "kv_cache_dtype"
    with pytest.raises(InvalidArgumentError, match="must be auto, int8, fp8 or the weights' bfloat16"):
        describe_engine(None, EngineConfig(device="emulated:sm_80", kv_cache_dtype="float16"))
