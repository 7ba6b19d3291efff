"""`LLM` from end to end: a tiny random model with a real tokenizer, and real models where they are."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from runtime import LLM, SamplingParams
from runtime.engine.errors import ContextLengthExceededError, EngineDeadError, RequestError
from runtime.engine.messages import PrefixMiss
from runtime.llm import Logprob, RequestOutput, progress
from runtime.progress import Reporter
from tests.models.folders import write_tiny_qwen3
from tests.runtime.text.tokenizers import SPECIAL, byte_level_content, byte_level_tokenizer, write

STORIES = Path(__file__).parents[4] / "shared" / "data" / "models"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_folder(folder: Path, *, has_tokenizer: bool = True) -> Path:
    """A Qwen3 with two layers, whose weights `load_format="dummy"` makes; EOS is the special token."""
    tokenizer = byte_level_tokenizer()
    eos = tokenizer.token_to_id(SPECIAL)
    assert eos is not None
    folder.mkdir(exist_ok=True)
    write_tiny_qwen3(folder, vocab_size=tokenizer.vocab_size, eos_token_id=eos, max_position_embeddings=256)
    if has_tokenizer:
        write(folder, byte_level_content())
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": SPECIAL}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, load_format="dummy") as llm:
        yield llm


def greedy_by_logits(llm: LLM, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(llm.logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_a_text_is_completed(llm: LLM) -> None:
    (result,) = llm.generate("the end", GREEDY)
    assert isinstance(result, RequestOutput)
    assert result.prompt == "the end"
    assert result.prompt_token_ids == llm.tokenizer.encode("the end")
    (choice,) = result.outputs
    assert choice.token_ids == greedy_by_logits(llm, result.prompt_token_ids, 12)
    assert choice.text == llm.tokenizer.decode(choice.token_ids)
    assert (choice.finish_reason, choice.stop_reason, choice.logprobs, choice.error) == (
        "length",
        None,
        None,
        None,
    )
    assert choice.times.arrival_s <= choice.times.first_token_s <= choice.times.last_token_s


def test_every_form_of_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("abc")
    forms = ["abc", {"prompt": "abc"}, {"prompt_token_ids": ids}, ids, np.array(ids), tuple(ids)]
    results = llm.generate(forms, GREEDY)
    assert [result.prompt_token_ids for result in results] == [ids] * 6
    assert len({result.outputs[0].text for result in results}) == 1
    for one in forms[:4]:
        assert [r.outputs[0].text for r in llm.generate(one, GREEDY)] == [results[0].outputs[0].text]
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        ([5.5], "prompts"),
        ([None], "prompts"),
        ({"text": "x"}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ([[1, 10**6]], "prompt"),
        ([[]], "prompt"),
        ([[1.5]], "prompt"),
    ],
)
def test_bad_prompts_are_refused(llm: LLM, prompts: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_a_bad_prompt_is_found_before_any_is_computed(llm: LLM) -> None:
    before = llm.client.stats().num_requests
    with pytest.raises(ContextLengthExceededError):
        llm.generate(["ab", [1] * 256], GREEDY)
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("a", [{"temperature": 0}])  # type: ignore[list-item]
    assert llm.client.stats().num_requests == before


def test_a_prompt_may_name_its_turn_and_its_salt(llm: LLM) -> None:
    ids = [7 + i % 90 for i in range(40)]
    prompt = {"prompt_token_ids": ids, "priority": -3}
    (first,) = llm.generate(prompt, GREEDY)
    assert first.num_cached_tokens == 0
    assert first.prefix_miss == PrefixMiss("unseen", 0, 0)
    again, other = llm.generate([prompt, {**prompt, "cache_salt": "tenant"}], GREEDY)
    assert (again.num_cached_tokens, other.num_cached_tokens) == (39, 0)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == other.outputs[0].token_ids
    messages = [{"role": "user", "content": "Hello to everybody out there, how are you today?"}]
    for salt, is_new in ((None, True), (None, False), ("tenant", True), ("tenant", False)):
        (answer,) = llm.chat(messages, GREEDY, cache_salt=salt, priority=2)
        assert (answer.num_cached_tokens == 0) == is_new
    for wrong, param in (
        ({"prompt": "a", "prioriti": 1}, "prompt"),
        ({"prompt": "a", "priority": "high"}, "priority"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "ttft_target_s": 1.0}, "ttft_target_s"),  # only the deadline policy takes targets
    ):
        with pytest.raises(RequestError) as caught:
            llm.generate(wrong, GREEDY)
        assert caught.value.param == param


def test_params_for_each_prompt_and_order(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (9, 1, 5)]
    results = llm.generate(["the", "abc", "end"], params)
    assert [len(result.outputs[0].token_ids) for result in results] == [9, 1, 5]
    assert [result.prompt for result in results] == ["the", "abc", "end"]


def test_logprobs_by_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate("the end", params)
    ids = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    logits = llm.logits(ids).astype(np.float64)
    logprobs = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    entries = [*result.prompt_logprobs, *result.outputs[0].logprobs]
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], 1):
        row = logprobs[position - 1]
        chosen = entry[ids[position]]
        assert isinstance(chosen, Logprob)
        assert chosen.logprob == pytest.approx(row[ids[position]], abs=1e-4)
        assert chosen.rank == 1 + (row > row[ids[position]]).sum()
        assert chosen.decoded_token == llm.tokenizer.token_bytes(ids[position]).decode("utf-8", "replace")
        best = int(row.argmax())
        assert entry[best].rank == 1
        assert len(entry) in ((1, 2) if position < len(result.prompt_token_ids) else (2, 3))
    total = sum(entry[i].logprob for entry, i in zip(result.outputs[0].logprobs, result.outputs[0].token_ids))
    assert result.outputs[0].cumulative_logprob == pytest.approx(total)


def test_n_choices_with_a_seed_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=7, temperature=1.0, max_tokens=10)
    (first,) = llm.generate("the", params)
    second = llm.generate(["xyz", "the"], params)[1]
    texts = [choice.text for choice in first.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1]
    assert texts[0] != texts[1]
    assert texts == [choice.text for choice in second.outputs]


def test_stop_strings_cut_the_text_and_free_the_choice(llm: LLM) -> None:
    (free,) = llm.generate("the end", SamplingParams(temperature=0.0, max_tokens=40))
    text = free.outputs[0].text
    stop = text[6:9]
    start = text.find(stop)
    for include in (False, True):
        params = SamplingParams(
            temperature=0.0, max_tokens=40, stop=[stop, "never"], include_stop_str_in_output=include
        )
        (result,) = llm.generate("the end", params)
        choice = result.outputs[0]
        assert choice.text == text[: start + (len(stop) if include else 0)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert len(choice.token_ids) < 40
        assert choice.token_ids == free.outputs[0].token_ids[: len(choice.token_ids)]


def test_a_stopped_choice_leaves_its_siblings_alone(llm: LLM) -> None:
    params = {"n": 3, "seed": 3, "temperature": 1.0, "max_tokens": 30, "ignore_eos": True}
    free = llm.generate("the end", SamplingParams(**params))[0].outputs
    text = free[0].text
    stop = next(text[i : i + 2] for i in range(4, 30) if all(text[i : i + 2] not in c.text for c in free[1:]))
    stopped = llm.generate("the end", SamplingParams(**params, stop=stop))[0].outputs
    assert (stopped[0].text, stopped[0].stop_reason) == (text[: text.find(stop)], stop)
    for ours, theirs in zip(stopped[1:], free[1:], strict=True):
        assert (ours.text, ours.token_ids, ours.finish_reason) == (theirs.text, theirs.token_ids, "length")


def test_a_fault_ends_its_request_with_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm.client._engine.executor.model, "forward", fail)  # type: ignore[attr-defined]
        (result,) = llm.generate("a prompt of more than a token, which none before it began with", GREEDY)
    assert (result.outputs[0].finish_reason, result.outputs[0].token_ids) == ("error", [])
    assert result.outputs[0].error
    assert llm.generate("the", GREEDY)[0].outputs[0].finish_reason == "length"


def test_eos_and_stop_ids(llm: LLM) -> None:
    (free,) = llm.generate("ab", SamplingParams(temperature=0.0, max_tokens=20))
    token_id = free.outputs[0].token_ids[3]
    count = free.outputs[0].token_ids.index(token_id) + 1
    (result,) = llm.generate("ab", SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[token_id]))
    choice = result.outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token_id)
    assert choice.token_ids == free.outputs[0].token_ids[:count]
    assert choice.text == llm.tokenizer.decode(choice.token_ids[:-1])
    eos = llm.client.info.eos_token_ids[0]
    biased = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={eos: 100.0})
    (result,) = llm.generate("ab", biased)
    assert (result.outputs[0].token_ids, result.outputs[0].text) == ([eos], "")
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", None)
    biased = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={eos: 100.0}, ignore_eos=True)
    (result,) = llm.generate("ab", biased)
    assert result.outputs[0].token_ids == [eos] * 20


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}]
    prompt = llm.tokenizer.encode("[user]abc\n[assistant]", add_special_tokens=False)
    assert llm.chat_prompt(messages) == prompt
    (one,) = llm.chat(messages, GREEDY)
    assert one.prompt_token_ids == prompt
    several = llm.chat([messages, [*messages, {"role": "assistant", "content": "x"}, *messages]], GREEDY)
    assert several[0].outputs[0].text == one.outputs[0].text
    assert len(several) == 2
    with pytest.raises(RequestError, match="empty") as caught:
        llm.chat_prompt([])
    assert caught.value.param == "messages"


def test_logits_are_the_models(llm: LLM) -> None:
    logits = llm.logits([1, 2, 3])
    assert (logits.shape, logits.dtype) == ((3, llm.client.info.vocab_size), np.float32)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(llm.logits([1, 2]), logits[:2], rtol=0, atol=1e-5)
    with pytest.raises(RequestError):
        llm.logits([10**6])


def test_stream_gives_the_same_text_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("the end", GREEDY)
    deltas = list(llm.stream("the end", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [i for delta in deltas for i in delta.token_ids] == whole.outputs[0].token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert len(deltas) > 1
    with pytest.raises(RequestError, match="n=2"):
        llm.stream("x", SamplingParams(n=2))


def test_a_stream_that_is_closed_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("the end", SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert len(list(islice(stream, 3))) == 3
    stream.close()  # type: ignore[attr-defined]
    llm.generate("x", GREEDY)  # a step later
    stats = llm.client.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)


def test_an_interrupt_cancels_what_is_open(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=None, ignore_eos=True))
    monkeypatch.undo()
    llm.generate("x", GREEDY)
    assert llm.client.stats().num_running == 0


@pytest.mark.parametrize(
    ("is_terminal", "use_tqdm", "is_shown"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_progress_is_shown_on_a_terminal_alone(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    use_tqdm: bool,
    is_shown: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(progress, "Reporter", partial(Reporter, first_s=0.0))  # else what is quick is not shown
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=use_tqdm)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("Prompts:" in printed.err) == is_shown


def test_more_prompts_than_the_queue_takes(folder: Path) -> None:
    with LLM(folder, load_format="dummy", max_waiting=3, max_num_seqs=2) as llm:
        results = llm.generate([[i] for i in range(20)], SamplingParams(temperature=0.0, max_tokens=3))
        assert [result.prompt_token_ids for result in results] == [[i] for i in range(20)]
        assert all(len(result.outputs[0].token_ids) == 3 for result in results)


def test_default_params_come_from_the_generation_config(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"do_sample": False, "max_new_tokens": 7, "top_k": 5}))
    with LLM(other, load_format="dummy") as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=7)
        assert len(llm.generate("x")[0].outputs[0].token_ids) <= 7
        assert llm.client.info.model_name == "other"
        assert llm.client.info.eos_token_ids == (byte_level_tokenizer().token_to_id(SPECIAL),)


def test_a_model_without_a_tokenizer_serves_ids(tmp_path: Path, folder: Path) -> None:
    bare = write_folder(tmp_path / "bare", has_tokenizer=False)
    with LLM(bare, load_format="dummy") as llm:
        assert llm.tokenizer is None
        (result,) = llm.generate([1, 2], SamplingParams(temperature=0.0, max_tokens=4, logprobs=1))
        assert (result.outputs[0].text, len(result.outputs[0].token_ids)) == ("", 4)
        assert all(e.decoded_token is None for entry in result.outputs[0].logprobs for e in entry.values())
        for call in (
            lambda: llm.generate("text", GREEDY),
            lambda: llm.generate([1], SamplingParams(stop="x")),
            lambda: llm.chat([{"role": "user", "content": "x"}]),
        ):
            with pytest.raises(RequestError, match=r"no tokenizer|has none"):
                call()
    with LLM(bare, load_format="dummy", tokenizer=folder) as llm:
        assert llm.generate("the", GREEDY)[0].outputs[0].text
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True) as llm:
        assert llm.tokenizer is None


def test_the_context_is_cut_to_the_kv_cache_or_refused(folder: Path) -> None:
    with LLM(folder, load_format="dummy", num_blocks=3) as llm:
        assert llm.client.info.max_model_len == 48
        assert (
            len(llm.generate([1] * 40, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0].token_ids) == 8
        )
    with pytest.raises(RequestError, match="4 KV blocks"):
        LLM(folder, load_format="dummy", num_blocks=3, max_model_len=49)


def test_close_and_forget(folder: Path) -> None:
    llm = LLM(folder, load_format="dummy")
    client = llm.client
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate("x", GREEDY)
    forgotten = LLM(folder, load_format="dummy")
    client = forgotten.client
    reference = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert reference() is None
    assert not client._thread.is_alive()  # type: ignore[attr-defined]


def test_two_models_and_two_threads_at_once(llm: LLM, folder: Path) -> None:
    expected = [result.outputs[0].token_ids for result in llm.generate(["the", "abc", "end"], GREEDY)]
    found: dict[int, list[list[int]]] = {}
    with LLM(folder, load_format="dummy") as other:

        def work(number: int) -> None:
            results = (llm, other)[number % 2].generate(["the", "abc", "end"], GREEDY)
            found[number] = [result.outputs[0].token_ids for result in results]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[number] for number in range(4)] == [expected] * 4


@pytest.mark.parametrize("name", ["stories260K", "slm4096-gpt2"])
def test_real_models_continue_as_transformers_does(name: str) -> None:
    if not STORIES.exists():
        pytest.skip("needs ../shared/data/models")
    expected = json.loads((STORIES / "expected.json").read_text())[name]
    with LLM(STORIES / name, dtype="float32") as llm:
        cases = expected["greedy"]
        params = [
            SamplingParams(temperature=0.0, max_tokens=len(case["output_ids"]), ignore_eos=True) for case in cases
        ]
        results = llm.generate([case["prompt_ids"] for case in cases], params)
        assert [result.outputs[0].token_ids for result in results] == [case["output_ids"] for case in cases]
        for i, case in enumerate(cases):
            golden = STORIES / name / f"golden_logits_{i}.npy"
            if golden.exists():
                theirs = np.load(golden)
                ours = llm.logits(case["prompt_ids"])[-len(theirs) :]
                assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
