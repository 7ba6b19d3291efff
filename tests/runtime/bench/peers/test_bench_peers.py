"""`bench peers` on a tiny GPT-2, with peers that play back what our engine gave, or spoil it. No times are asserted.

The real peers run where the checkout has their Pythons.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from models.registry import load_model
from runtime.bench.load.samples import random_prompts
from runtime.bench.metrics import BenchmarkError
from runtime.bench.peers import bench_peers as peers
from runtime.bench.peers import rounds as peer_rounds
from runtime.bench.peers.bench_peers import bench_peers, failures, tokenizer_row
from runtime.bench.peers.cpu_limits import CpuLimits, LimitMeter, ModelSize, limit_rate, open_meter
from runtime.bench.peers.host_work import bench_load, bench_pack
from runtime.bench.peers.ik_llama import check_folder
from runtime.bench.peers.peer_llama import write_gguf
from runtime.bench.peers.report import PEER_GOALS, host_row, markdown
from runtime.bench.peers.rounds import LLAMA, PEER_ENGINES, TRANSFORMERS
from runtime.bench.peers.workloads import (
    DTYPES,
    GGUF,
    GGUF_WORKLOADS,
    GPT2,
    WORKLOADS,
    Gpt2Shape,
    Group,
    Workload,
    gguf_groups,
    groups_of,
    named,
    write_gpt2_folder,
    write_qwen3_folder,
)
from runtime.bench.scheduling.roofline import PRESETS
from runtime.cli import app
from runtime.llm import LLM
from tools.write_moe_gguf import SHAPES, write

ROOT = Path(__file__).resolve().parents[4]
SHAPE = Gpt2Shape(hidden_size=32, num_layers=2, num_heads=2, vocab_size=97, max_positions=64)
LIMITS = CpuLimits(2, 20e9, 200e9, None, 800e9)
SLOWED = CpuLimits(2, 19e9, 90e9, None, 790e9)  # a neighbour's moment


def a_meter() -> LimitMeter:
    """Of LIMITS, but at first."""
    moments = iter([SLOWED])
    return LimitMeter(lambda: next(moments, LIMITS))


TINY = (
    Workload("decode-1", "decode", 2, 5, 4, "decode"),
    Workload("prefill", "prefill", 1, 20, 1, "prefill"),
    Workload("burst", "burst", 3, 4, 3, "burst", is_also_sequential=True),
)

FAKE_PEER = """#!{python}
import json, sys, time
import numpy
answers = json.load(open({answers!r}))
for line in sys.stdin:
    request = json.loads(line)
    reply = {{"processor_s": 0.0}}
    if request["op"] == "load":
        reply |= {{"transformers": "1.2", "threads": 1, "variants": ["slow", "fast"]}}
    if request["op"] == "logits":
        logits = numpy.load(f"{logits}/{{len(request['token_ids'])}}.npy")
        {spoil}
        numpy.save(request["path"], logits)
        reply["path"] = request["path"]
    if request["op"] == "generate":
        time.sleep(0.001)
        seconds = 0.001 if request["variant"] == "fast" else 0.002
        tokens = answers[json.dumps([request["prompts"], request["new_tokens"]])]
        reply |= {{"token_ids": tokens, "prefill_s": seconds, "decode_s": seconds, "total_s": 2 * seconds}}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what our engine says to the workloads' prompts, and to the prompt whose logits are compared."""
    folder = tmp_path_factory.mktemp("answers")
    write_gpt2_folder(folder / "model", SHAPE)
    with LLM(folder / "model", device="cpu", dtype="float32", skip_tokenizer_init=True) as llm:
        said = {}
        for workload in TINY:
            [prompt] = random_prompts(1, workload.longest, SHAPE.vocab_size, 0)
            np.save(folder / f"{workload.longest}.npy", np.asarray(llm.logits(prompt)))
            prompts = random_prompts(workload.num_prompts, workload.prompt_len, SHAPE.vocab_size, 1)
            sample = peers.OurSide(llm).run(prompts, workload)
            said[json.dumps([prompts, workload.new_tokens])] = sample.token_ids
    (folder / "answers.json").write_text(json.dumps(said))
    return folder


def fake_peer(folder: Path, answers: Path, spoil: str = "") -> Path:
    """A "Python" that is called with a peer's script, which it does not read."""
    path = folder / "python"
    fields = {"answers": str(answers / "answers.json"), "logits": str(answers), "spoil": spoil}
    path.write_text(FAKE_PEER.format(python=sys.executable, **fields))
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rounds, "IDLE_SHARE", math.inf)  # other tests may be running beside


def measure(pythons: dict[str, Path], workloads: tuple[Workload, ...] = TINY, **options: Any) -> dict[str, Any]:
    groups = groups_of(workloads, ["float32"])
    said: list[str] = []
    report = bench_peers(pythons, groups, num_rounds=2, shape=SHAPE, meter=a_meter(), say=said.append, **options)
    json.dumps(report, allow_nan=False)
    assert len(said) >= 1 + len(report["results"])
    return report


def test_a_whole_report(tmp_path: Path, answers: Path) -> None:
    report = measure({TRANSFORMERS.name: fake_peer(tmp_path, answers)})
    assert report["refused"] == []
    assert [result["workload"] for result in report["results"]] == ["decode-1", "prefill", "burst"]
    for result in report["results"]:
        assert 2 <= result["num_rounds_tried"] <= 4
        assert set(result["sides"]) == {"xserv", "transformers"}
        for rates in result["sides"].values():
            assert len(rates["tokens_per_second"]) == 2
            assert 0 < rates["min_tokens_per_second"] <= rates["median_tokens_per_second"]
            assert rates["median_tokens_per_second"] <= rates["max_tokens_per_second"]
            assert 0 < rates["ttft_ms"] <= rates["latency_ms"]
        medians = {name: rates["median_tokens_per_second"] for name, rates in result["sides"].items()}
        assert result["ratios"] == {"transformers": pytest.approx(medians["xserv"] / medians["transformers"])}
        assert len(result["round_ratios"]["transformers"]) == 2
        assert result["variants"] == {"transformers": "fast"}
        assert result["missing"] == ["llama.cpp"]
        assert result["num_ties"] == {"transformers": 0}
        assert result["share_of_limit"] == pytest.approx(medians["xserv"] / result["limit_tokens_per_second"])
    decode, prefill, burst = report["results"]
    assert decode["sides"]["transformers"]["median_tokens_per_second"] == pytest.approx(2 * 3 / 0.001)
    assert prefill["sides"]["transformers"]["median_tokens_per_second"] == pytest.approx(20 / 0.002)
    assert burst["sides"]["transformers"]["median_tokens_per_second"] == pytest.approx(9 / 0.002)
    assert decode["verdict"] == prefill["verdict"] == "unknown"  # their goals are beside llama.cpp
    assert "goal" not in burst
    alone = burst["one_after_another"]
    assert len(alone["tokens_per_second"]) == 2
    assert "one_after_another" not in decode
    assert report["peers"]["transformers"][f"{GPT2} float32"]["logits_relative_error"] == 0.0
    text = markdown(report)
    assert "| decode | float32 |" in text
    assert "| missing |" in text
    assert report["limits"]["float32_flops_per_s"] == 200e9
    assert report["limits"]["num_measured"] == 1 + sum(result["num_rounds_tried"] for result in report["results"])
    assert "20.0 GB/s read, 200 GFLOP/s in float32, 800 Gop/s by vpdpbusd." in text
    assert "not steady, others used the machine: at worst 90 GFLOP/s in float32." in text
    size = ModelSize.of({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "vocab_size": 97})
    assert decode["limit_tokens_per_second"] == limit_rate(LIMITS, size, "float32", TINY[0])
    assert len(failures(report)) == 2


def test_both_peers_and_the_one_that_counts(tmp_path: Path, answers: Path) -> None:
    peer = fake_peer(tmp_path, answers)
    report = measure({engine.name: peer for engine in PEER_ENGINES}, TINY[:1])
    [result] = report["results"]
    assert list(result["ratios"]) == ["transformers", "llama.cpp"]
    assert result["missing"] == []
    assert result["ratio"] == result["ratios"]["llama.cpp"]
    assert result["verdict"] in ("ahead", "met", "missed")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("logits[0, 0] = numpy.nan", "differ by nan"),
        ("logits += 0.5", r"differ by \d"),
        ("logits = logits[1:]", "of ours"),
    ],
)
def test_a_peer_that_disagrees_is_not_timed(tmp_path: Path, answers: Path, spoil: str, words: str) -> None:
    report = measure({LLAMA.name: fake_peer(tmp_path, answers, spoil)}, TINY[:1])
    assert report["results"] == []
    [refused] = report["refused"]
    assert refused["workload"] == f"all of {GPT2}"
    assert re.search(words, refused["reason"])
    assert "Refused:" in markdown(report)
    assert len(failures(report)) == 1


def test_wrong_tokens_are_refused_and_the_rest_is_measured(tmp_path: Path, answers: Path) -> None:
    said = json.loads((answers / "answers.json").read_text())
    first = next(iter(said))
    said[first][1][2] = (said[first][1][2] + 1) % SHAPE.vocab_size
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "answers.json").write_text(json.dumps(said))
    for path in answers.glob("*.npy"):
        (wrong / path.name).write_bytes(path.read_bytes())
    report = measure({LLAMA.name: fake_peer(tmp_path, wrong)})
    assert [result["workload"] for result in report["results"]] == ["prefill", "burst"]
    [refused] = report["refused"]
    assert refused["workload"] == "decode-1"
    assert "request 1 gave token" in refused["reason"]


@pytest.mark.parametrize(
    ("spoil", "words", "num_left"),
    [
        ("raise SystemExit('no more')", "llama.cpp ended with status 1 at 'logits': no more", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "llama.cpp ended by SIGILL at 'logits'", 0),
        ("answers.popitem()", "llama.cpp ended with status 1 at 'generate': KeyError", 2),
    ],
)
def test_a_peer_that_dies_is_left_out(tmp_path: Path, answers: Path, spoil: str, words: str, num_left: int) -> None:
    """The last workload's answer is not there in the last case."""
    peers = {LLAMA.name: tmp_path / "dies", TRANSFORMERS.name: tmp_path / "lives"}
    for path in peers.values():
        path.mkdir()
    pythons = {name: fake_peer(path, answers, spoil if path.name == "dies" else "") for name, path in peers.items()}
    report = measure(pythons)
    assert report["refused"] == []
    assert [LLAMA.name in result["sides"] for result in report["results"]] == [n < num_left for n in range(3)]
    assert [LLAMA.name in result["missing"] for result in report["results"]] == [n >= num_left for n in range(3)]
    assert all(TRANSFORMERS.name in result["sides"] for result in report["results"])
    [died] = report["died"]
    assert died["reason"].startswith(words)
    assert f"Left out of {GPT2} (float32): {words}" in markdown(report)
    assert sum(words in line for line in failures(report)) == 1


FAKE_IK = """#!{python}
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-m"].endswith(".gguf"), given
if os.path.exists({stop!r}):
    os.kill(os.getpid(), 4)
slow = 1 if given["-fa"] == "1" else 3
if sys.argv[0].endswith("llama-bench"):
    tokens = int(given["-p"]) + int(given["-n"])
    assert given["-o"] == "json" and given["-r"] == "1", given
    times = [dict(build_commit="8337e4c", cpu_info="a processor", avg_ns=tokens * slow * 1000000)]
    print("warming up")
    print("llama_model_loader: [\\n loaded", file=sys.stderr)
    print("[\\n" + json.dumps(times) [1:])
else:
    prompt, later, count = (int(given[name]) for name in ("-npp", "-ntg", "-npl"))
    assert int(given["-c"]) == (prompt + later) * count, given
    numbers = [prompt, later, count, 0, 0, count * prompt / (slow * 0.5), 0, count * later / (slow * 0.25), 0, 0]
    print("|    PP |     TG |", file=sys.stderr)
    print("|-------|--------|", file=sys.stderr)
    print("|" + " |".join(f"{{each:7}}" for each in numbers) + " |", file=sys.stderr)
"""


def fake_ik(folder: Path, stop: Path) -> Path:
    """A folder with programs that write as ik_llama.cpp's do, a millisecond a token or three quarters of a second a
    batch, three times that without flash attention; once `stop` exists, they die."""
    folder.mkdir()
    for name in ("llama-bench", "llama-batched-bench"):
        (folder / name).write_text(FAKE_IK.format(python=sys.executable, stop=str(stop)))
        (folder / name).chmod(0o755)
    return folder


def test_ik_llama_tells_rates(tmp_path: Path, answers: Path) -> None:
    write_gpt2_folder(tmp_path / "model", SHAPE)
    file = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "model", file, "float32")
    tiny = tuple(replace(each, model="tiny", dtypes=(GGUF,)) for each in (*TINY, replace(TINY[0], num_prompts=1)))
    stop = tmp_path / "stop"
    folder = fake_ik(tmp_path / "ik", stop)
    report = bench_peers(
        {}, [Group("tiny", GGUF, tiny, file)], num_rounds=1, meter=a_meter(), ik_llama=folder, say=lambda line: None
    )
    assert (report["refused"], report["died"]) == ([], [])
    rates = [each["sides"]["ik_llama.cpp"]["median_tokens_per_second"] for each in report["results"]]
    assert rates == [pytest.approx(rate) for rate in (2 * 3 / 0.25, 1000.0, 9 / 0.75, 1000.0)]
    assert {each["variants"]["ik_llama.cpp"] for each in report["results"]} <= {"flash", "flash, repacked"}
    said = {"build": "8337e4c", "processor": "a processor", "threads": peer_rounds.usable_cores()}
    assert report["peers"]["ik_llama.cpp"] == {"tiny gguf": said}
    text = markdown(report)
    assert "ik_llama.cpp (8337e4c)" in text
    assert "| 1,000.0 |" in text
    stop.touch()
    report = bench_peers({}, [Group("tiny", GGUF, tiny[:1], file)], num_rounds=1, meter=a_meter(), ik_llama=folder)
    assert [list(each["sides"]) for each in report["results"]] == [["xserv"]]
    assert "ik_llama.cpp ended by SIGILL at 'llama-bench'" in report["died"][0]["reason"]


def test_ik_llama_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"--ik-llama .*: llama-bench of ik_llama\.cpp is not there"):
        check_folder(tmp_path)
    check_folder(fake_ik(tmp_path / "ik", tmp_path / "stop"))
    with pytest.raises(BenchmarkError, match="--clock processor"):
        bench_peers({}, [], clock="processor", ik_llama=tmp_path)


def test_sides_that_disturb_each_other_are_refused(
    tmp_path: Path, answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_rounds, "IDLE_SHARE", -1.0)
    report = measure({LLAMA.name: fake_peer(tmp_path, answers)}, TINY[:1])
    assert "disturbed each other" in report["refused"][0]["reason"]


@pytest.mark.parametrize("engine", PEER_ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_peers(engine: Any, dtype: str) -> None:
    python = ROOT / engine.venv / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {engine.venv} with {engine.packages}")
    if dtype not in engine.dtypes:
        pytest.skip(f"{engine.name} has no {dtype}")
    shape = Gpt2Shape(hidden_size=64, num_layers=2, num_heads=2, vocab_size=97, max_positions=64)
    groups = groups_of(TINY, [dtype])
    report = bench_peers({engine.name: python}, groups, num_rounds=1, shape=shape, meter=a_meter())
    assert report["refused"] == []
    assert len(report["results"]) == (3 if dtype == "float32" else len(TINY))


@pytest.mark.parametrize("architecture", SHAPES)
def test_llama_cpp_runs_the_same_experts(tmp_path: Path, architecture: str) -> None:
    """The same logits of the same file, or the report refuses."""
    python = ROOT / LLAMA.venv / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {LLAMA.venv} with {LLAMA.packages}")
    path = tmp_path / "model.gguf"
    shape = {**SHAPES[architecture], "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "expert": 64}
    write(path, architecture, 2, seed=1, shape={**shape, "experts": 6, "used": 2}, vocab_size=300)
    report = bench_peers({LLAMA.name: python}, gguf_groups([path], ["decode-1"]), num_rounds=1, meter=a_meter())
    assert report["refused"] == []
    [errors] = report["peers"][LLAMA.name].values()
    assert errors["logits_relative_error"] < 0.05


def test_peers_python_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"\.venv-reference.*pip install torch transformers.*--peer-python"):
        TRANSFORMERS.python(None, tmp_path)
    with pytest.raises(BenchmarkError, match=r"\.venv-llama.*pip install llama-cpp-python gguf.*--llama-python"):
        LLAMA.python(None, tmp_path)
    python = tmp_path / ".venv-llama" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert LLAMA.python(None, tmp_path) == python


def test_what_is_named(tmp_path: Path) -> None:
    assert named("--x", None, ("a", "b", "c"), ("a", "c")) == ("a", "c")
    assert named("--x", "c, a", ("a", "b", "c"), ()) == ("a", "c")
    with pytest.raises(BenchmarkError, match=r"--x: 'd' is none of a, b, c"):
        named("--x", "a,d", ("a", "b", "c"), ())
    groups = groups_of(WORKLOADS, DTYPES)
    assert [(group.model, group.dtype, len(group.workloads)) for group in groups] == [
        ("gpt2-124m", "float32", 6),
        ("gpt2-124m", "bfloat16", 5),
        ("gpt2-124m", "int8", 5),
        ("qwen3-0.6b", "bfloat16", 1),
    ]
    file = tmp_path / "model-Q4_0.gguf"
    with pytest.raises(BenchmarkError, match=r"--gguf: .*model-Q4_0\.gguf is no file"):
        gguf_groups([file], GGUF_WORKLOADS)
    file.touch()
    on_file = gguf_groups([file], GGUF_WORKLOADS)
    assert [(group.model, group.gguf, len(group.workloads)) for group in on_file] == [("model-Q4_0", file, 5)]
    keys = {(workload.key, group.dtype) for group in (*groups, *on_file) for workload in group.workloads}
    assert set(PEER_GOALS) <= keys


def test_a_gguf_file(tmp_path: Path) -> None:
    """The limit comes from the file's own bytes; a share of it is enough for batch 1."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = json.loads(json.dumps({**PRESETS["qwen3-0.6b"], **sizes}))
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 70}
    write_qwen3_folder(tmp_path, config)
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path, "q8_0")
    size = ModelSize.of_gguf(path)
    weights = 64 * (64 + 2 * 32 + 64 + 3 * 96)
    assert size == ModelSize(weights, 70 * 64, (weights + 70 * 64) * 34 // 32)
    groups = gguf_groups([path], ["decode-1"])
    report = bench_peers({}, groups, num_rounds=2, meter=a_meter(), say=lambda line: None)
    [result] = report["results"]
    assert (result["model"], result["missing"], report["refused"]) == ("model", ["llama.cpp"], [])
    assert result["limit_tokens_per_second"] == pytest.approx(LIMITS.read_bytes_per_s / size.size_bytes)
    goal = PEER_GOALS["decode-1", GGUF]
    assert goal.verdict(row({"llama.cpp": 0.9}, share=0.86)) == "met"
    assert goal.verdict(row({"llama.cpp": 0.9}, share=0.84)) == "missed"


def test_of_experts_a_step_reads_those_that_its_tokens_go_to(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shape = {**SHAPES["qwen3moe"], "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "expert": 32, "experts": 8}
    write(path, "qwen3moe", 1, seed=0, shape={**shape, "used": 2}, vocab_size=96)
    size = ModelSize.of_gguf(path)
    maps, router, experts = 64 * 3 * 64, 8 * 64, 8 * 3 * 32 * 64
    assert size == ModelSize(
        maps + router, 96 * 64, (maps + 96 * 64) * 18 // 32 + 4 * router, experts, experts * 18 // 32, 0.25
    )
    workload = WORKLOADS[0]
    slow_memory = replace(LIMITS, read_bytes_per_s=1.0)
    for tokens, share in ((1, 0.25), (3, 1 - 0.75**3)):
        read = size.size_bytes + share * size.expert_bytes
        several = replace(workload, num_prompts=tokens)
        assert limit_rate(slow_memory, size, GGUF, several) == pytest.approx(tokens / read)
    assert list(load_model(path).config.layer_windows) == [None]


def row(ratios: dict[str, float], *, share: float = 0.9, ttft_ms: float = 40.0, missing: tuple[str, ...] = ()) -> Any:
    return {"ratios": ratios, "share_of_limit": share, "sides": {"xserv": {"ttft_ms": ttft_ms}}, "missing": missing}


def test_verdicts() -> None:
    first, burst = PEER_GOALS["decode-1", "float32"], PEER_GOALS["burst", "bfloat16"]
    assert first.verdict(row({"llama.cpp": 1.05, "transformers": 0.5})) == "met"
    assert first.verdict(row({"llama.cpp": 1.2})) == "ahead"
    assert first.verdict(row({"llama.cpp": 0.99})) == "missed"
    assert first.verdict(row({"llama.cpp": math.nan})) == "missed"
    assert first.verdict(row({"llama.cpp": 1.2}, share=0.84)) == "missed"
    assert first.verdict(row({"llama.cpp": 1.2}, share=math.nan)) == "missed"
    assert first.verdict(row({"transformers": 3.0})) == "unknown"
    assert burst.verdict(row({"llama.cpp": 1.6, "transformers": 2.6})) == "met"
    assert burst.verdict(row({"llama.cpp": 1.4, "transformers": 2.6})) == "missed"
    assert burst.verdict(row({"llama.cpp": 1.6, "transformers": 2.6}, ttft_ms=51.0)) == "missed"
    assert burst.verdict(row({"transformers": 2.6}, missing=("llama.cpp",))) == "unknown"
    assert [host_row("load", value)["verdict"] for value in (4.0, 49.0, 51.0, math.nan)] == [
        "ahead", "met", "missed", "missed",
    ]  # fmt: skip


def test_limits_of_a_model() -> None:
    size = ModelSize.of({"model_type": "gpt2", "n_embd": 10, "n_layer": 2, "vocab_size": 50})
    assert size == ModelSize(layer_weights=2400, head_weights=500)
    qwen = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 20}
    small = ModelSize.of({"model_type": "qwen3", "hidden_size": 10, "num_hidden_layers": 3, "vocab_size": 7, **qwen})
    assert small == ModelSize(3 * (10 * 32 + 2 * 10 * 16 + 10 * 32 + 3 * 200), 70)
    limits = CpuLimits(1, 2900.0 * 4, 1e9, None, 8e3)  # a second to read float32; arithmetic is free
    decode = Workload("d", "d", 2, 5, 3, "decode")
    assert limit_rate(limits, size, "float32", decode) == pytest.approx(2.0)
    assert limit_rate(limits, size, "bfloat16", decode) == pytest.approx(4.0)
    assert limit_rate(limits, size, "int8", decode) == pytest.approx(2 / (2 * 2 * 2900 / 8e3))  # arithmetic counts
    burst = Workload("b", "b", 2, 5, 3, "burst")
    assert limit_rate(limits, size, "float32", burst) == pytest.approx(2 * 3 / 3.0)
    prefill = Workload("p", "p", 1, 7, 1, "prefill")
    assert limit_rate(limits, size, "int8", prefill) == pytest.approx(7 / (2 * (2400 * 7 + 500) / 8e3))


def test_limits_of_this_processor() -> None:
    with open_meter(read_buffer_bytes=1 << 22, loop_s=1e-3) as meter:
        first = meter.best()
        meter.measure()
        limits = meter.best()
        assert meter.report()["num_measured"] == 2
    assert limits.read_bytes_per_s >= first.read_bytes_per_s
    assert limits.float32_flops_per_s >= first.float32_flops_per_s
    assert limits.num_threads >= 1
    assert 1e8 < limits.read_bytes_per_s < 1e13
    assert 1e8 < limits.float32_flops_per_s < 1e14
    for rate in (limits.bfloat16_flops_per_s, limits.int8_ops_per_s):
        assert rate is None or 1e8 < rate < 1e15


def test_loading_and_packing(tmp_path: Path) -> None:
    write_gpt2_folder(tmp_path, SHAPE)
    load, pack = bench_load(tmp_path, 2), bench_pack(tmp_path, 2)
    assert load["num_tensors"] == 4 + 2 * 12
    assert load["file_bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert 0 < load["value"] < math.inf
    matrices = 97 * 32 + 64 * 32 + 2 * 12 * 32 * 32
    assert pack["matrix_bytes"] == 4 * matrices
    assert pack["value"] == pytest.approx(pack["pack_s"] / pack["copy_s"])
    assert pack["resident_mapped_bytes"] is None or pack["resident_mapped_bytes"] < 1 << 20


def test_tokenizer_rows() -> None:
    spread = {name: {"median": median} for name, median in (("ours", 30.0), ("tokenizers", 5.0), ("tiktoken", 15.0))}
    encode = tokenizer_row({"work": "encode, prose", "unit": "MB/s", **spread})
    assert (encode["value"], encode["verdict"]) == (2.0, "ahead")
    assert encode["said"] == "encode, prose: ours 30, tokenizers 5, tiktoken 15 MB/s"
    del spread["tiktoken"]
    alone = tokenizer_row({"work": "encode, prose", "unit": "MB/s", **spread})
    assert (alone["value"], alone["verdict"]) == (None, "unknown")
    prompt = tokenizer_row({"work": "a prompt", "unit": "us", "ours": {"median": 19.0}})
    assert (prompt["value"], prompt["verdict"]) == (19.0, "met")
    report = {
        "results": [],
        "refused": [],
        "died": [],
        "limits": None,
        "peers": {},
        "host_results": [encode, alone, prompt],
    }
    assert markdown(report).count("| unknown |") == 1
    assert len(failures(report)) == 1


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "Gpt2Shape", lambda: SHAPE)
    out = tmp_path / "report.json"
    result = CliRunner().invoke(
        app, ["bench", "peers", "--workloads", "load", "--num-rounds", "1", "--output-json", str(out), "--check"]
    )
    report = json.loads(out.read_text())
    [load] = report["host_results"]
    assert load["workload"] == "load"
    assert report["limits"] is None
    assert load["work"] in result.stdout
    assert (result.exit_code == 0) == (load["verdict"] != "missed")

    def missed(*_: Any, **__: Any) -> dict[str, Any]:
        return {**report, "host_results": [host_row("load", 99.0)]}

    monkeypatch.setattr(peers, "bench_peers", missed)
    assert CliRunner().invoke(app, ["bench", "peers", "--workloads", "load"]).exit_code == 0
    result = CliRunner().invoke(app, ["bench", "peers", "--workloads", "load", "--check"])
    assert result.exit_code == 1
    assert "load: missed" in result.stderr
