"""What a warm start of `xserv chat` does before its first answer: counted, since times depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CODE = """
import gc, json, sys
from runtime.cli import main
import runtime.engine.process.compile_ahead as ahead
from models.base import Model
from numba_kernels.closure_cache import CFunction

made, kernels, collections = [], [], []
gc.callbacks.append(lambda phase, info: collections.append(phase) if phase == "start" else None)
make_model, make_kernel = Model.__init__, CFunction.__init__

def counted_model(model, *arguments):
    made.append(type(model).__name__)
    make_model(model, *arguments)

def counted_kernel(kernel, *arguments, **options):
    make_kernel(kernel, *arguments, **options)
    kernels.append(kernel.was_kept)

Model.__init__, CFunction.__init__ = counted_model, counted_kernel
sys.argv = ["xserv", "chat"]
try:
    main()
except SystemExit as error:
    assert not error.code, error.code
print(json.dumps({
    "modules": sorted(sys.modules), "models": made, "kernels": len(kernels), "compiled": kernels.count(False),
    "collections": len(collections),
}), file=sys.stderr)
"""

NOT_BEFORE_AN_ANSWER = {
    # what serves, downloads, constrains, draws, reads pictures or shows a page
    "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "huggingface_hub", "llguidance", "rich",
    "prompt_toolkit", "pygments", "PIL", "httpcore", "ray", "opentelemetry",
    # what a library would bring without need
    "pydantic", "torch", "transformers", "tokenizers", "cuda", "numba_cuda",
}  # fmt: skip
OURS = {"runtime", "models", "numba_kernels", "tokenizer", "server"}
MOST_MODULES = 478
"""Of this project; a start had 400 on 2026-11-28. Adapters, samplers' chains and parsers of templates added 37;
hand-overs between engines, adapters of experts, new weights and tenants 22; logits processors, limits of steps and
pinned copies of weights 12; an engine's start in several files and tokenizers of whole words 2; attention
by AMX 2 and recorded towers 1, for two that had gone."""
CONSTRUCTIONS = 2
"""Runs of the model's constructor: one that declares, one that loads."""


@pytest.fixture(scope="module")
def start() -> dict[str, object]:
    command = [sys.executable, "-c", CODE]
    for _ in range(2):  # where nothing is compiled yet, the first one compiles
        done = subprocess.run(
            command, cwd=ROOT, input="What is 17 plus 25?\n", capture_output=True, text=True, encoding="utf-8"
        )
        assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    counted: dict[str, object] = json.loads(done.stderr.splitlines()[-1])
    return counted


def test_only_what_an_answer_needs_is_imported(start: dict[str, object]) -> None:
    modules = start["modules"]
    assert isinstance(modules, list)
    packages = {name.split(".")[0] for name in modules}
    assert packages & NOT_BEFORE_AN_ANSWER == set()
    ours = [name for name in modules if name.split(".")[0] in OURS]
    assert len(ours) <= MOST_MODULES, f"{len(ours)} modules"
    assert [name for name in ours if name.startswith("models.families.")] == ["models.families.llama"]


def test_nothing_is_compiled_and_few_constructors_run(start: dict[str, object]) -> None:
    assert start["compiled"] == 0
    assert 0 < int(str(start["kernels"])) <= 20
    models = start["models"]
    assert isinstance(models, list)
    assert len(models) == CONSTRUCTIONS


def test_the_collector_holds_off(start: dict[str, object]) -> None:
    """Some come after the start, with the answer's objects, on a busy machine more; without the hold there are
    hundreds."""
    assert int(str(start["collections"])) <= 20
