"""`bench profile`: on the cpu and on an emulated device each kernel is named, and nothing of it stays behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from numba_kernels.cpu.running.launch import Kernel
from numba_kernels.cpu.running.recording import Recording
from runtime.bench.kernels.step_profile import HOST_PARTS, as_lines, bench_profile
from runtime.bench.metrics import BenchmarkError
from runtime.cli import app
from runtime.device.gpu import Gpu
from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from tests.models.folders import load_golden, write_model

TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "attention_bias": False, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 256,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tiny")
    (found / "config.json").write_text(json.dumps(TINY))
    return found


def engine_of(folder: Path, device: str, **settings: Any) -> Engine:
    settings = {"overlap": "off", "decode_graphs": "off"} | settings
    return build_engine(
        str(folder), device=device, load_format="dummy", max_model_len=64, max_num_seqs=4, kv_cache_bytes=1 << 22,
        block_size=8, **settings,
    )  # fmt: skip


def profile(folder: Path, device: str, **options: Any) -> dict[str, Any]:
    engine = engine_of(folder, device)
    return bench_profile(engine, **{"batch": 2, "prompt_len": 9, "num_steps": 3} | options)


def check(report: dict[str, Any]) -> None:
    assert list(report["phases"]) == ["prefill", "decode"]
    for name, phase in report["phases"].items():
        assert sum(line["share"] for line in phase["work"]) == pytest.approx(1)
        assert phase["tokens"] == (18 if name == "prefill" else 6)
        assert all(phase["host"][f"{part}_ms"] >= 0 for part in HOST_PARTS)
        assert all(line["runs"] > 0 for line in phase["work"])
    assert report["phases"]["decode"]["steps"] == 3


def test_experts_are_clocked(tmp_path: Path) -> None:
    report = profile(write_model(tmp_path / "experts", load_golden("gemma4_moe_odd")), "cpu")
    work = {line["name"]: line for line in report["phases"]["decode"]["work"]}
    assert work["experts"]["runs"] == 2 * work["route"]["runs"] == 2 * 3 * 3  # two launches, layers x steps


@pytest.mark.parametrize("decode_graphs", ["on", "off"])
def test_the_cpus_launches_are_clocked(folder: Path, decode_graphs: str) -> None:
    before = vars(Kernel)["__call__"], vars(Recording)["_run"]
    engine = engine_of(folder, "cpu", decode_graphs=decode_graphs)
    report = bench_profile(engine, batch=2, prompt_len=9, num_steps=3)
    check(report)
    assert report["measured_by"] == "clocks"
    work = {line["name"]: line for line in report["phases"]["decode"]["work"]}
    assert work["attention"]["runs"] == 2 * 3  # layers x steps
    assert work["linear"]["runs"] == (4 * 2 + 1) * 3  # and the output head
    assert work["sampling"]["runs"] == 3
    assert all(line["ms"] > 0 for line in work.values())
    assert report["phases"]["decode"]["products_share"] == work["linear"]["share"]
    assert "besides products with weights" in "\n".join(as_lines(report))
    assert (vars(Kernel)["__call__"], vars(Recording)["_run"]) == before


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_an_emulated_devices_kernels_are_counted(folder: Path) -> None:
    report = profile(folder, "emulated:sm_90a")
    check(report)
    assert report["measured_by"] == "counts"
    work = report["phases"]["decode"]["work"]
    (decode,) = (line for line in work if line["name"].startswith("attention_decode"))
    assert decode["runs"] == 2 * 3
    assert decode["tensor_flops"] > 0
    assert all(line["bound_ms"] > 0 and line["moved_bytes"] > 0 for line in work)
    assert "launch" not in vars(Gpu.of("emulated:sm_90a"))
    assert "mean nothing for a GPU" in "\n".join(as_lines(report))


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 5}, {"prompt_len": 60}, {"num_steps": 0}])
def test_sizes_that_do_not_fit_are_refused(folder: Path, options: dict[str, int]) -> None:
    with pytest.raises(BenchmarkError, match=r"at least 1|do not fit"):
        profile(folder, "cpu", **options)


@pytest.mark.emulator
def test_graphs_and_the_overlapped_loop_hide_what_is_asked_for(folder: Path) -> None:
    for device, settings in (("cpu", {"overlap": "on"}), ("emulated:sm_90a", {"decode_graphs": "on"})):
        with pytest.raises(BenchmarkError, match="plain loop without graphs"):
            bench_profile(engine_of(folder, device, **settings), batch=1, prompt_len=2, num_steps=1)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    files = [tmp_path / "report.json", tmp_path / "profile.svg"]
    done = CliRunner().invoke(
        app,
        ["bench", "profile", "--model", str(folder), "--device", "cpu", "--load-format", "dummy", "--max-model-len",
         "64", "--kv-cache-bytes", str(1 << 22), "--batch-size", "2", "--input-len", "9", "--num-steps", "2",
         "--output-json", str(files[0]), "--plot", str(files[1])],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "decode: 2 steps, 4 tokens" in done.output
    assert json.loads(files[0].read_text())["phases"]["prefill"]["tokens"] == 18
    assert any("linear" in (each.text or "") for each in ElementTree.parse(files[1]).iter())
