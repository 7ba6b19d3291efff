"""Perplexity: its windows, and its numbers against the logits of the same engine and of a uniform model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import LLM
from runtime.bench.perplexity import Window, log_probabilities, summary, windows
from tests.models.folders import golden_tensors, load_golden, write_model, write_safetensors
from tests.runtime.commands.running import invoke


@given(num_tokens=st.integers(2, 400), window=st.integers(2, 90), stride=st.integers(1, 89))
@settings(max_examples=200, deadline=None)
def test_every_token_but_the_first_is_scored_once(num_tokens: int, window: int, stride: int) -> None:
    stride = min(stride, window - 1)
    cut = windows(num_tokens, window, stride)
    scored = [at for each in cut for at in range(each.first_scored, each.end)]
    assert scored == list(range(1, num_tokens))
    for number, each in enumerate(cut):
        assert each.start == number * stride
        assert each.end == min(each.start + window, num_tokens)
        assert each.start < each.first_scored < each.end


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((1, 8, 4), "1 tokens"), ((9, 1, 1), "window 1"), ((9, 4, 4), "stride is 4"), ((9, 4, 0), "stride is 0")],
)
def test_windows_refuse(sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        windows(*sizes)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_model(tmp_path_factory.mktemp("model"), load_golden("llama_tied_gqa4"))
    with LLM(folder, device="cpu", skip_tokenizer_init=True, kv_cache_bytes=1 << 21) as made:
        yield made


def test_scores_are_those_of_the_logits(llm: LLM) -> None:
    token_ids = np.random.default_rng(0).integers(0, 97, 50).tolist()
    cut = windows(len(token_ids), 12, 5)
    expected = []
    for each in cut:
        rows = llm.logits(token_ids[each.start : each.end]).astype(np.float64)
        rows -= np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) + rows.max(1, keepdims=True)
        expected += [rows[at - 1 - each.start, token_ids[at]] for at in range(each.first_scored, each.end)]
    found = list(log_probabilities(llm, token_ids, cut))
    assert [len(scores) for scores in found] == [each.end - each.first_scored for each in cut]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)
    report = summary(iter(found), token_ids, 12, 5)
    assert report["num_scored_tokens"] == 49
    assert report["perplexity"] == pytest.approx(math.exp(-np.mean(expected)), rel=1e-5)


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large(tmp_path: Path) -> None:
    golden = load_golden("llama_default")
    folder = write_model(tmp_path, golden)
    tensors = golden_tensors(golden)
    tensors["lm_head.weight"] = np.zeros_like(tensors["lm_head.weight"])
    write_safetensors(folder / "model.safetensors", tensors)
    with LLM(folder, device="cpu", skip_tokenizer_init=True, kv_cache_bytes=1 << 21) as llm:
        token_ids = list(range(40))
        report = summary(log_probabilities(llm, token_ids, windows(40, 16, 8)), token_ids, 16, 8)
    assert report["perplexity"] == pytest.approx(97, rel=1e-6)


def test_a_missing_or_broken_score_is_an_error() -> None:
    assert summary(iter([[-1.0], [-1.0]]), [1, 2, 3], 2, 1)["perplexity"] == pytest.approx(math.e)
    for scores in ([[-1.0]], [[-1.0], [math.nan]], [[-1.0], [-math.inf]]):
        with pytest.raises(ValueError, match="not all finite or not one for each of 2"):
            summary(iter(scores), [1, 2, 3], 2, 1)
    assert windows(3, 2, 1) == [Window(0, 2, 1), Window(1, 3, 2)]


def test_the_command(tmp_path: Path) -> None:
    """Over the bundled model: its report."""
    text = tmp_path / "text.txt"
    text.write_text("What is 17 plus 25?\n" * 9)
    status, out, _ = invoke("perplexity", str(text), "--device", "cpu", "--window", "32", "--json")
    assert status == 0
    report = json.loads(out)
    assert (report["window"], report["stride"]) == (32, 16)
    with LLM(device="cpu") as llm:
        token_ids = llm.get_tokenizer().encode(text.read_text())
        expected = summary(log_probabilities(llm, token_ids, windows(len(token_ids), 32, 16)), token_ids, 32, 16)
    assert {name: report[name] for name in expected} == pytest.approx(expected)
    status, out, _ = invoke("perplexity", str(text), "--device", "cpu", "--max-tokens", "40")
    assert (status, out.split()[0], out.split()[-2]) == (0, "perplexity", "39")
    assert invoke("perplexity", str(text), "--device", "cpu", "--stride", "9000")[0] == 2
    text.write_bytes(b"\xff\xfe")
    status, _, err = invoke("perplexity", str(text))
    assert (status, "UTF-16" in err, err.count("\n")) == (2, True, 1)
