"""Every command that README and docs show is one that this program takes, and runs as it is written there.

A command that no table of this file knows fails the test: whoever documents one says here what it prints, or why it
cannot be run here.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from runtime.cli import app
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.errors import XservError

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "measurements" / "README.md"]
STARTS = re.compile(r"(?:\.venv/bin/)?xserv (?:--)?[a-z]|python3? -m |python tools/|make (?:-s )?[a-z]|printf ")

QUICK = {
    r"printf 'What is 17 plus 25?\n' | make -s chat": "42",
    r"printf 'What is 34 times 12?\n' | make -s chat MODEL=models/demo_moe": "34 * 12 = 408",
    r"printf 'Which bar is the largest?\n' | make -s chat MODEL=models/demo_vision "
    "ARGS='--image models/demo_vision/chart.png'": "The blue bar is the largest.",
    'xserv generate --prompt "Once upon a time" --json': '"finish_reason"',
    'xserv tokenize "some text"': "Ġte",
    "xserv info": "KV",
    "xserv kernels list": "",
    "xserv chat": "",  # on a pipe: one message
}
"""What runs in seconds, and something that it prints."""

SLOW = {
    'xserv generate --device emulated:sm_80 --gemm naive --chat --prompt "What is 17 plus 25?"': "42",
    "make chat DEVICE=emulated": "42",
    "xserv bench overhead": "host (ms a step)",
    "xserv info --device cpu --pipeline-parallel-size 2": "stage 1",
    "python -m tools.simulate --shared-prefixes 1000,64,2000,100,16,0 --config qwen3-8b --gpu h200 --num-blocks 2500 "
    "--max-concurrency 64 --replicas 4": "hit_rate",
    "xserv bench streaming --device cpu --pipeline-parallel-size 2": "tokens/s",
    "xserv bench streaming": "",
    "xserv bench memory": "",
    "python -m tools.measure_decisions": '"tokens_ratio"',
    "python -m tools.eval_demo_model --num 200 --check": "",
    "python -m tools.eval_demo_model --vision --num 200 --check": "",
}
"""What takes a minute or more."""

ELSEWHERE = {
    "a GPU": (
        "make chat DEVICE=cuda", "xserv bench kernels", "xserv bench profile",
        "python -m tools.gpu_check", "python -m tools.tune_kernels",
    ),
    "a server that runs until it is stopped": (
        "make serve", "xserv serve", "xserv serve MODEL",
        "xserv serve MODEL --tensor-parallel-size 2", "xserv serve MODEL --pipeline-parallel-size 2",
        "xserv serve MODEL --data-parallel-size 4 --ray-address auto",
        "xserv serve --data-parallel-size N --ray-address …",
        "xserv serve BAAI/bge-small-en-v1.5", "xserv serve BAAI/bge-reranker-v2-m3",
        "xserv serve MODEL --enable-lora --max-loras 4 --max-lora-rank 32 --lora-modules support=/adapters/support",
        "xserv serve Qwen/Qwen3-8B embed=BAAI/bge-m3",
        "xserv serve --models-config models.toml --models-memory 60 --keep-alive 30m",
        "xserv serve FOLDER-OF-A-CLASSIFIER", "xserv serve Qwen/Qwen3-0.6B", "xserv serve models/demo",
        "xserv deploy ray", "xserv serve --ray-address",
        "xserv deploy ray --model MODEL --min-replicas 1 --max-replicas 4",
        "xserv serve MODEL --prefill-engines 1 --decode-engines 3",
        "xserv serve MODEL --data-parallel-size 4 --engine-roles auto",
        "xserv serve MODEL --port 8100 --kv-transfer-address 10.0.0.1:7000 --kv-transfer-key-file key"
        " --kv-transfer-peer 10.0.0.2:7000",
        "xserv serve MODEL --port 8200 --kv-transfer-address 10.0.0.2:7000 --kv-transfer-key-file key"
        " --kv-transfer-peer 10.0.0.1:7000",
        "xserv serve MODEL --data-parallel-size 2", "xserv serve /path/to/folder --data-parallel-size 2",
        "xserv serve --model …", "python tools/serving/soak.py --minutes 10",
        "xserv serve /path/to/folder --max-model-len 4096 --port 8000",
        "xserv serve /path/to/folder --host 0.0.0.0 --api-key-file keys.txt --log-format json",
        "python tools/serving/soak.py --minutes 10 --clients 8",
        "python tools/serving/fuzz_api.py --cases 20000 --clients 3 --seed 2010239145",
        "python tools/serving/fuzz_pictures.py --url http://127.0.0.1:8000 --pid PID",
        "xserv bench serve",
        "xserv bench serve --trace conversation.jsonl --trace-rate 2 --goodput ttft:500 --goodput tpot:50",
        "xserv bench accuracy --url http://host:8000 --gsm8k test.jsonl --shots train.jsonl --records answers.jsonl",
        "xserv bench accuracy --url http://host:8000 --perplexity text.txt", "xserv bench accuracy",
        "xserv bench accuracy --url URL", "xserv bench accuracy --url URL --perplexity TEXT --context 256 --piece 256",
        "xserv bench serve --base-url http://host:8000 --endpoint chat "
        "--num-prompts 500 --request-rate 20 --burstiness 0.5",
        "xserv bench serve --prefix-len 512 --num-prefixes 4 --max-concurrency 64 --api-key KEY --base-url …",
        "python -m runtime.cli bench serve --num-prompts 200 --input-len 32 "
        "--output-len 100 --device cpu --goodput ttft:2000",
    ),
    "other engines beside this one": (
        "xserv bench adapters", "xserv bench encoders", "xserv bench peers",
        "xserv bench peers --workloads tokenizer --tokenizer tokenizer.json",
        "python -m runtime.cli bench peers --output-json docs/measurements/DATE-cpu-table.json > table.md",
        "python -m runtime.cli bench peers --gguf FILE --peers llama.cpp --llama-python PYTHON "
        "--workloads WORKLOAD --num-rounds N",
        "python -m tools.write_moe_gguf qwen3moe FILE --layers 8", "python -m tools.write_random_gguf",
        "python3 -m venv .venv-llama && .venv-llama/bin/pip install llama-cpp-python gguf numpy",
        "python3 -m venv .venv-reference && .venv-reference/bin/pip install torch transformers numpy",
        "python -m tools.references.make_eagle3_goldens",
        "python -m tools.references.make_dflash_goldens", "python -m tools.references.make_mtp_goldens",
        "python -m tools.references.make_assistant_goldens",
    ),
    "a hub, or a file that the reader has": (
        "xserv chat --model Qwen/Qwen3-VL-4B-Instruct --image chart.png", "make chat MODEL=Qwen/Qwen3-0.6B",
        "make chat MODEL=Qwen/Qwen3-0.6B-GGUF:Q8_0",
        "xserv quantize /path/to/folder /path/to/new-folder --format int4-g32", "xserv quantize",
        "xserv bench states", "xserv bench states TRACE", "xserv bench roles", "xserv bench roles TRACE --steps FILE",
        "xserv bench roles TRACE --steps docs/measurements/2026-11-30-step-times.json --engines 2,4 --plot roles.svg",
        "python -m tools.simulate_roles TRACES PARTS OUT.json --plot docs/roles.svg",
        "xserv chat /path/to/model-Q4_K_M.gguf", "xserv chat /path/to/base-model --chat-template template.jinja",
        "xserv perplexity TEXT",
        "xserv chat --adapter /adapters/support",
        "xserv embed TEXTS.txt --model MODEL --output vectors.npy",
        "xserv embed texts.txt --model models/demo --output vectors.npy",
        'xserv rank "a query" TEXTS.txt --model MODEL',
        "xserv run-batch INPUT.jsonl OUTPUT.jsonl --model MODEL",
        "python -m tools.plot_attention MODEL PROMPT", "python -m tools.plot_timeline",
        "python -m tools.simulate", "xserv perplexity TEXT --model FOLDER [--quantization int8]",
        "python -m tools.simulate AzureLLMInferenceTrace_conv.csv --config qwen3-8b --gpu h200",
        "python -m tools.simulate AzureLLMInferenceTrace_conv.csv --config qwen3-32b --rate 0.2 --num-requests 200 "
        "--max-num-batched-tokens 512 --tenants 5 --flood 15",
    ),
    "many minutes of a quiet machine": (
        "xserv bench exact", "xserv bench products", "xserv bench products --rates", "xserv bench kernels --device cpu",
        "xserv bench kernels --device cpu --parts states",
        "python -m runtime.cli bench speculation --model FOLDER --batches 1,4,8 --rates 0.3,0.5,0.7,0.8,0.9 "
        "--output-len 100",
        "xserv bench schedule", "xserv bench stalls", "xserv bench simulation",
        "xserv bench speculation",
        "xserv bench stalls --tpot-ratio 1.7 --num-decodes 8 --prompt-len 4096",
        "python -m runtime.cli bench memory --output-json docs/measurements/DATE-cpu-memory.json",
        "python -m tools.eval_demo_model --num 200 [--quantization int8]", "python -m tools.quality",
        "python -m tools.kernel_report",
        "python -m tools.kernel_report --only counted --ladders docs/measurements/kernel-counts.md",
        "xserv kernels build",
        "python -m tools.comparing.compare_speculation",
        "python -m tools.train_drafter", "python -m tools.measure_drafter --num 10",
    ),
    "it runs these tests, or undoes what they need": (
        "make test", "make test-all", "make style", "xserv kernels clear",
    ),
    "it writes into the checkout, or the user's home": (
        "python -m tools.make_python_page", "xserv --install-completion", "xserv quantize MODEL OUT --format …",
    ),
    "the same as others, without arguments": ("make chat", "python -m xserv"),
}  # fmt: skip
"""What is not run here: why, and which commands."""


def documented() -> Iterator[tuple[str, str]]:
    """Page and command of all that is shown in a block, or between backticks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = "".join(re.findall(r"```(?:sh|console)\n(.*?)```", text, re.S)).splitlines()
        prose = re.sub(r"```.*?```", "", text, flags=re.S)
        found += re.findall(r"^    (.+)$", prose, re.M) + re.findall(r"`([^`\n]+)`", prose)
        for line in found:
            command = re.sub(r"\s+# .*", "", line.strip().removeprefix("$ ")).removesuffix("\\").strip()
            if STARTS.match(command):
                yield from ((page.name, each) for each in alternatives(command))


def alternatives(command: str) -> list[str]:
    r"""``xserv kernels build\|list`` as two commands."""
    for word in command.split():
        if r"\|" in word:
            return [command.replace(word, each) for each in word.split(r"\|")]
    return [command]


def test_each_is_run_here_or_says_why_not() -> None:
    known = {*QUICK, *SLOW, *(command for commands in ELSEWHERE.values() for command in commands)}
    shown = {command for _, command in documented()}
    assert sorted(shown - known) == [], "documented, but in no table of this file"
    assert sorted(known - shown) == [], "in a table of this file, but documented nowhere"


def test_every_option_exists() -> None:
    """The subcommands and options that a page names are the program's, or in the tool's help."""
    wrong, whole = [], typer.main.get_command(app)
    for page, command in documented():
        words = [word.strip("[]") for word in shlex.split(command.split(" > ")[0].split(" && ")[0])]
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        if words[0] in ("make", "printf", "python3"):
            continue
        if words[0] == "python" and not command.startswith(("python -m runtime.cli", "python -m xserv")):
            tool = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
            taken = help_of(ROOT / tool) if options else ""
            wrong += [f"{page}: {command}: {option}" for option in options if option not in taken]
            continue
        inner = whole
        rest = words[3:] if words[0] == "python" else words[1:]
        while rest and not rest[0].startswith("-") and hasattr(inner, "get_command"):
            found = subcommand(inner, rest.pop(0))
            assert found is not None, f"{page}: {command}: there is no such command"
            inner = found
        names = {name for parameter in inner.params for name in (*parameter.opts, *parameter.secondary_opts)}
        wrong += [f"{page}: {command}: {option}" for option in options if option not in names]
    assert wrong == []


@functools.cache
def subcommand(group: Any, name: str) -> Any:
    """A group's command; None where there is none. To make one takes long, for all that it asks typer."""
    return group.get_command(typer.Context(group), name)


@functools.cache
def help_of(tool: Path) -> str:
    """What a tool's ``--help`` prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as changed, contextlib.redirect_stdout(printed):
        changed.setattr(sys, "argv", [str(tool), "--help"])
        changed.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(tool), run_name="__main__")
    assert ended.value.code in (0, None), f"{tool}: {printed.getvalue()}"
    return printed.getvalue()


def run_as_written(command: str, folder: Path, timeout_s: float) -> str:
    """What it prints. `xserv` and `python` are this environment's; files are written in `folder`."""
    binaries = Path(sys.executable).parent
    outside = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES")}
    environment = {**outside, "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = command.replace(".venv/bin/", f"{binaries}/").replace("tools/", f"{ROOT}/tools/")
    command = re.sub(r"\bmake ", f"make -C {ROOT} ", command)
    command = re.sub(r"^xserv ", f"{binaries}/python -m runtime.cli ", command)
    message = None if "|" in command else "What is 17 plus 25?\n"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder, env=environment, input=message, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("command", QUICK)
def test_quick(command: str, tmp_path: Path) -> None:
    assert QUICK[command] in run_as_written(command, tmp_path, 300)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", SLOW)
def test_slow(command: str, tmp_path: Path) -> None:
    assert SLOW[command] in run_as_written(command, tmp_path, 590)


def test_the_python_of_the_readme(tmp_path: Path) -> None:
    """Its block that needs no server."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    (block,) = [block for block in blocks if "from xserv import LLM" in block]
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "tenalp"


def test_without_a_gpu_the_commands_that_need_one_say_so(tmp_path: Path) -> None:
    try:
        Gpu.of(Device.parse("cuda"))
        pytest.skip("there is a GPU here")
    except XservError as error:
        reason = str(error).split(":")[0]
    done = subprocess.run(
        [sys.executable, "-m", "runtime.cli", "chat", "--device", "cuda"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, input="", capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
