"""A child forked from a process with an engine: the inherited one raises at once, and the child may make its own."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from numba_kernels.cpu.running import pool
from runtime import LLM, SamplingParams
from runtime.engine.errors import EngineDeadError
from runtime.engine.grammar import compiler
from tests.models.folders import write_tiny_qwen3
from tests.waiting import TIMEOUT_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
PROMPT = {"prompt_token_ids": [5, 6, 7]}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def in_child(work: Callable[[], None]) -> str:
    """Runs `work` in a forked child: "" or what it raised. A child that hangs is ended by an alarm."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks of processes with threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(int(TIMEOUT_S))
        try:
            work()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status), f"the child was ended by signal {os.WTERMSIG(status)}: it hung"
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forked")
    write_tiny_qwen3(folder, vocab_size=300, eos_token_id=299, max_position_embeddings=128)
    return folder


def make(folder: Path) -> LLM:
    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, device="cpu")


def test_a_forked_engine_raises_at_once_and_a_new_one_runs(folder: Path) -> None:
    with make(folder) as llm:
        expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

        def use() -> None:
            for call in (
                lambda: llm.generate([PROMPT], GREEDY, use_tqdm=False), lambda: next(llm.stream(PROMPT, GREEDY)),
                lambda: llm.embed([PROMPT], use_tqdm=False), lambda: llm.logits([1, 2]),
            ):  # fmt: skip
                with pytest.raises(EngineDeadError, match="forked from that, and a fork has no engine: make an LLM"):
                    call()
            llm.close()
            with make(folder) as own:
                assert own.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected

        with llm.client._condition, pool.lock, compiler._starting:  # as if threads were in the midst of their work
            assert in_child(use) == ""
        again = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert again[0].outputs[0].token_ids == expected, "the parent's engine runs on"
