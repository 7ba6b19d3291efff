"""Grammars within the loop: compiled while others run, in both loops, through preemption, and none of it anyone else's
affair. The fake model's ids are characters here."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.grammar import compiler
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.masks import MaskComputer
from runtime.engine.grammar.matcher import LazyVocabulary
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.process.thread_client import ThreadEngineClient
from tests.runtime.engine.fakes import (
    Collected,
    collect,
    each_loop,
    make_engine,
    request,
    run_to_end,
    said_by_engine,
)
from tests.server.byte_tokenizer import make_byte_tokenizer
from tests.waiting import TIMEOUT_S
from tokenizer import Tokenizer

__all__ = ["each_loop"]

DIGITS = Grammar(kind="regex", text="[0-9]{24}")
WORDS = Grammar(kind="regex", text="([A-Z]{3} ){2}[A-Z]{3}")
NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "minItems": 3, "maxItems": 5}
GRAMMARS = (
    DIGITS,
    WORDS,
    Grammar(kind="choice", text='["AB", "A CHOICE", "123"]'),
    Grammar(kind="json_schema", text=json.dumps(NUMBERS)),
    Grammar(kind="lark", text='start: "(" start ")" | /[0-9]{2}/'),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def engines(tokenizer: Tokenizer) -> Iterator[Any]:
    """A function that makes engines over the fake model, whose 97 ids are the first bytes and the last its end."""
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engine = make_engine(**settings)
        engine.vocabulary = LazyVocabulary(lambda: tokenizer, engine.info.vocab_size, engine.info.eos_token_ids)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def text_of(collected: Collected, index: int = 0) -> str:
    return bytes(i for i in collected.token_ids(index) if i != 96).decode()


def asked(name: str, grammar: Grammar | None, **params: Any) -> EngineRequest:
    """With draws, so that it does not run round in circles."""
    fields = {"max_tokens": 42, "temperature": 1.0, "seed": sum(name.encode()), **params}
    return request(name, [3, 1, 4, 1, 5], grammar=grammar, **fields)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_each_kind_in_each_loop(grammar: Grammar, each_loop: bool, engines: Any) -> None:
    engine = engines()
    for seed in range(4):
        engine.add(asked(f"r{seed}", grammar))
    for collected in run_to_end(engine).values():
        text = text_of(collected)
        assert collected.finish_reason() == "stop"
        if grammar is DIGITS or grammar is WORDS:
            assert re.fullmatch(grammar.text, text)
        elif grammar.kind == "choice":
            assert text in json.loads(grammar.text)
        elif grammar.kind == "lark":
            assert re.fullmatch(r"\(*[0-9]{2}\)*", text)
            assert text.count("(") == text.count(")")
        else:
            assert 3 <= len(json.loads(text)) <= 5


def mixed(count: int) -> list[EngineRequest]:
    requests = []
    for i in range(count):
        params: dict[str, Any] = {"max_tokens": 8 + 5 * i % 40, "n": 1 + i % 3, "logprobs": i % 4 or None}
        if i % 5 == 1:
            params |= {"min_tokens": 3}
        if i % 5 == 2:
            params |= {"frequency_penalty": 0.5}
        if i % 7 == 3:
            params |= {"ignore_eos": True}
        requests.append(asked(f"m{i}", [*GRAMMARS, None][i % 6], **params))
    return requests


def ids_of(results: dict[str, Collected]) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    return {
        (name, index): (collected.token_ids(index), collected.finish_reason(index))
        for name, collected in results.items()
        for index in {output.index for output in collected.outputs}
    }


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_same_alone_and_preempted_in_each_loop(each_loop: bool, preemption: Any, engines: Any) -> None:
    requests = mixed(14)
    alone: dict[str, Collected] = {}
    lone = engines(enable_prefix_caching=False)
    for each in requests:
        lone.add(each)
        run_to_end(lone, alone)
    swap_space = 1 << 20 if preemption == "swap" else 0
    tight = engines(max_model_len=48, num_blocks=10, preemption=preemption, swap_space_bytes=swap_space)
    for each in requests:
        tight.add(each)
    together = run_to_end(tight)
    assert tight.scheduler.num_preemptions > 0
    assert ids_of(together) == ids_of(alone)


def test_a_cut_text_is_a_beginning(engines: Any) -> None:
    engine = engines()
    for length in range(1, 12):
        engine.add(asked(f"cut{length}", WORDS, seed=9, max_tokens=length))
    engine.add(asked("whole", WORDS, seed=9))
    results = run_to_end(engine)
    whole = text_of(results["whole"])
    assert re.fullmatch(WORDS.text, whole)
    for length in range(1, 11):
        assert text_of(results[f"cut{length}"]) == whole[:length]
        assert results[f"cut{length}"].finish_reason() == "length"
    assert results["cut11"].finish_reason() == "stop"  # complete, though there was no room for an end


class Gate:
    """Holds every compilation back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        compile_grammar = compiler.compile_grammar

        def compile_later(*args: Any) -> Any:
            self.entered.release()
            assert self.opened.wait(TIMEOUT_S)
            return compile_grammar(*args)

        monkeypatch.setattr(compiler, "compile_grammar", compile_later)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_others_run_while_a_grammar_is_compiled(gate: Gate, each_loop: bool, engines: Any) -> None:
    engine = engines()
    engine.add(asked("waits", DIGITS))
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    engine.add(asked("runs", None, max_tokens=10))
    results: dict[str, Collected] = {}
    while "runs" not in results or results["runs"].finish_reason() is None:
        collect(engine.step(), results)
        engine.check_invariants()
        assert engine.stats().num_waiting >= 1
    assert "waits" not in results
    assert engine.step() == []  # returns, so that others are heard
    gate.opened.set()
    run_to_end(engine, results)
    assert re.fullmatch(DIGITS.text, text_of(results["waits"]))


@pytest.mark.parametrize("index", [None, 0, 1])
def test_a_request_that_is_cancelled_while_it_is_compiled(gate: Gate, index: int | None, engines: Any) -> None:
    engine = engines()
    engine.add(asked("waits", DIGITS, n=2))
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    engine.step()
    outputs = engine.cancel("waits", index)
    assert [(output.index, output.finish_reason) for output in outputs] == [
        (i, "abort") for i in ([0, 1] if index is None else [index])
    ]
    engine.check_invariants()
    gate.opened.set()
    results = run_to_end(engine)
    if index is None:
        assert not results
    else:
        assert re.fullmatch(DIGITS.text, text_of(results["waits"], 1 - index))


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines()
    engine.add(asked("bad", Grammar(kind="regex", text="(["), n=2))
    engine.add(asked("good", DIGITS))
    results = run_to_end(engine)
    assert [output.finish_reason for output in results["bad"].outputs] == ["error", "error"]
    assert (results["bad"].outputs[0].error or "").startswith("grammar: invalid regex")
    assert re.fullmatch(DIGITS.text, text_of(results["good"]))
    assert not said_by_engine(caplog)  # the user's mistake is not the operator's


def masks_are_computed(engine: Any) -> None:
    """Until then nobody may touch a matcher of the step that is under way."""
    assert engine.steps._masks._thread is not None
    engine.steps._masks._thread.submit(lambda: None).result()


def test_a_matcher_that_fails_ends_its_request_alone(each_loop: bool, engines: Any) -> None:
    engine = engines()
    engine.add(asked("bad", DIGITS, n=2))
    engine.add(asked("good", DIGITS))
    results: dict[str, Collected] = {}
    while "bad" not in results:
        collect(engine.step(), results)
    broken = engine.requests["bad"].sequences[0].matcher
    assert broken is not None
    masks_are_computed(engine)
    assert not broken.consume(65)  # a letter, where a digit stands
    assert broken.error is not None
    run_to_end(engine, results)
    assert results["bad"].finish_reason(0) == "error"
    assert "grammar" in str(results["bad"].of(0)[-1].error)
    assert re.fullmatch(DIGITS.text, text_of(results["good"]))


def test_masks_that_cannot_be_begun_fail_their_step_alone(
    each_loop: bool, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines()
    begin = MaskComputer._begin

    def fails_once(*arguments: Any) -> Any:
        monkeypatch.setattr(MaskComputer, "_begin", begin)
        raise RuntimeError("planted: no thread for masks")

    monkeypatch.setattr(MaskComputer, "_begin", fails_once)
    engine.add(asked("bad", DIGITS))
    results = run_to_end(engine)
    assert results["bad"].finish_reason() == "error"
    engine.add(asked("good", DIGITS))
    assert re.fullmatch(DIGITS.text, text_of(run_to_end(engine)["good"]))
    engine.check_invariants()


def test_a_grammar_and_allowed_ids_that_exclude_each_other_end_the_request(engines: Any) -> None:
    engine = engines()
    engine.add(asked("none", DIGITS, allowed_token_ids=[65, 66]))
    engine.add(asked("good", DIGITS))
    results = run_to_end(engine)
    assert results["none"].finish_reason() == "error"
    assert re.fullmatch(DIGITS.text, text_of(results["good"]))


def test_an_engine_that_knows_no_text_refuses_grammars() -> None:
    with pytest.raises(RequestError, match="no text") as error:
        make_engine().prepare(asked("x", DIGITS))
    assert error.value.param == "grammar"


def test_a_client_hears_cancels_while_its_only_request_is_compiled(gate: Gate, engines: Any) -> None:
    client = ThreadEngineClient(engines())
    try:
        ended = threading.Event()
        outputs: list[EngineOutput] = []

        def sink(output: EngineOutput) -> None:
            outputs.append(output)
            ended.set()

        client.submit(asked("waits", DIGITS), sink)
        assert gate.entered.acquire(timeout=TIMEOUT_S)
        assert client.stats().num_waiting == 1
        client.cancel("waits")
        assert ended.wait(TIMEOUT_S)
        assert [output.finish_reason for output in outputs] == ["abort"]
    finally:
        gate.opened.set()
        client.close()


def test_closing_ends_a_request_that_is_compiled(gate: Gate, engines: Any) -> None:
    client = ThreadEngineClient(engines())
    outputs: list[EngineOutput] = []
    client.submit(asked("waits", DIGITS), outputs.append)
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    threading.Timer(0.2, gate.opened.set).start()
    client.close()
    assert [output.finish_reason for output in outputs] == ["abort"]


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_on_an_emulated_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    """The draw applies the mask on the device; steps with a grammar run without a decode graph."""
    from tests.models.folders import load_golden, write_model
    from tests.server.byte_tokenizer import write_byte_tokenizer

    folder = write_model(tmp_path, load_golden("qwen3_tied_gqa4"))
    write_byte_tokenizer(folder)
    results = []
    for device in ("cpu", "emulated:sm_80"):
        engine = build_engine(folder, device=device, dtype="float32", max_model_len=64, num_blocks=32, block_size=8)
        for i, grammar in enumerate([DIGITS, None, WORDS]):
            engine.add(request(f"r{i}", [5, 6, 7], grammar=grammar, max_tokens=14, temperature=0.0))
        results.append(ids_of(run_to_end(engine)))
        engine.close()
    assert results[0] == results[1]
