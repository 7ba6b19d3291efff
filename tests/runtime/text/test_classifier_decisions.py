"""Decisions of classifiers, beside the scores of `LLM`'s own pairs and labels, whose goldens are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.messages import PoolingRequest
from runtime.errors import XservError
from runtime.llm import LLM
from runtime.pooling import PoolingInfo, ScoreActivation
from runtime.text.classifier_decisions import reading_of
from runtime.text.decisions import Choice, ChoiceAnswer, ChoiceQuestion
from runtime.text.pooled_texts import pair_of
from tests.models.encoder_cases import QUERY, TEXTS, write_encoder
from tests.server.real_server import serving_real

CHOICE: dict[str, Any] = {
    "type": "choice", "instructions": "It is about {}.",
    "choices": [{"value": "foxes"}, {"value": True}, {"value": "中"}],
}  # fmt: skip
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "It is about foxes.", "name": "n"}
LEVELS: dict[str, Any] = {
    "type": "score",
    "instructions": "Its place is",
    "levels": [{"label": "low"}, {"label": "high"}],
}


def folder_of(folder: Path, case: str, labels: list[str]) -> Path:
    write_encoder(folder, case)
    config = json.loads((folder / "config.json").read_text())
    assert len(config["id2label"]) == len(labels)
    config["id2label"] = {str(number): label for number, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scores(llm: LLM, first: str, second: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    tokenizer, pooling = llm.get_tokenizer(), llm.client.info.pooling
    ids, second_from = pair_of(tokenizer, pooling, first, second)
    return llm.client.embed(PoolingRequest(ids, task="classify", second_from=second_from)).result().astype(np.float64)


def test_a_model_of_inference(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "modernbert_labels", ["CONTRADICTION", "neutral", "ENTAILMENT"])
    questions = [PREDICATE, CHOICE, LEVELS]
    with LLM(folder, use_tqdm_on_load=False) as llm:
        (decision,) = llm.decide(TEXTS[0], questions, use_tqdm=False)
        said = scores(llm, TEXTS[0], "It is about foxes.")
        options = np.array([scores(llm, TEXTS[0], f"It is about {each}.")[2] for each in ("foxes", "true", "中")])
        levels = np.array([scores(llm, TEXTS[0], f"Its place is {each}")[2] for each in ("low", "high")])
        assert [len(each.answers) for each in llm.decide([TEXTS[0]] * 2, questions, use_tqdm=False)] == [3, 3]
    predicate, choice, rated = decision.answers
    assert predicate.probability == pytest.approx(1 / (1 + np.exp(said[0] - said[2])))  # type: ignore[union-attr]
    assert predicate.confidence == pytest.approx(  # type: ignore[union-attr]
        np.exp(max(said[0], said[2])) / np.exp(said).sum()
    )
    # transformers 5.24: pipeline("zero-shot-classification"), multi_label=True for the predicate
    assert [each.probability for each in choice.probabilities] == pytest.approx(  # type: ignore[union-attr]
        [0.3446672558784485, 0.4109193682670593, 0.24441345036029816], abs=1e-5
    )
    assert predicate.probability == pytest.approx(0.26532381772994995, abs=1e-5)  # type: ignore[union-attr]
    shares = np.exp(options) / np.exp(options).sum()
    assert [each.probability for each in choice.probabilities] == pytest.approx(shares)  # type: ignore[union-attr]
    assert choice.choice == ["foxes", True, "中"][int(shares.argmax())]  # type: ignore[union-attr]
    assert rated.score == pytest.approx(np.exp(levels[1]) / np.exp(levels).sum())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("activation", "scores", "probabilities", "confidence"),
    [
        ("softmax", [-60, -61, 60], [0.7310586, 0.2689414], 0),
        ("sigmoid", [-120, -120, 3], [0.5, 0.5], 0),
        ("identity", [-1, 1, 0], [0.1192029, 0.8807971], 0.665241),
    ],
)
def test_options_that_the_model_hardly_believes_have_probabilities(
    activation: ScoreActivation, scores: list[float], probabilities: list[float], confidence: float
) -> None:
    pooling = PoolingInfo(labels=("a", "b", "c"), activation=activation)
    question = ChoiceQuestion(instructions="", choices=[Choice("a"), Choice("b")])
    reading = reading_of(question, "x", pooling, "questions[0]")
    found = reading.answer([np.array(scores, np.float32)], pooling)
    assert isinstance(found, ChoiceAnswer)
    assert [each.probability for each in found.probabilities] == pytest.approx(probabilities)
    assert found.confidence == pytest.approx(confidence)
    with pytest.raises(XservError, match="not numbers"):
        reading.answer([np.array([np.nan, *scores[1:]], np.float32)], pooling)


def test_a_reranker_tells_predicates(tmp_path: Path) -> None:
    with LLM(write_encoder(tmp_path, "bert_pairs"), use_tqdm_on_load=False) as llm:
        (decision,) = llm.decide(TEXTS[5], [{"type": "predicate", "instructions": QUERY}], use_tqdm=False)
        (score,) = llm.score(QUERY, TEXTS[5])
        assert decision.answers[0].probability == pytest.approx(score.outputs.score)  # type: ignore[union-attr]
        with pytest.raises(RequestError, match="'foxes', which is none of the model's labels 'label 0'"):
            llm.decide("a", [CHOICE])


def test_labels_are_options_over_http(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "modernbert_labels", ["bad", "fair", "good"])
    rating = {"type": "score", "instructions": "?", "levels": [{"label": each} for each in ("bad", "fair", "GOOD")]}
    choice = {"type": "choice", "instructions": "?", "choices": [{"value": "good"}, {"value": "bad"}], "name": "c"}
    with serving_real(folder) as real:
        decision = real.openai.decisions.create(model=real.model, input=TEXTS[0], questions=[rating, choice])  # type: ignore[list-item]
        probs = np.array(real.http.post("/classify", json={"input": TEXTS[0]}).json()["data"][0]["probs"])
        rated, chosen = decision.answers
        assert rated.score == pytest.approx(probs @ [0, 1, 2], rel=1e-5)  # type: ignore[union-attr]
        pair = probs[[2, 0]]
        assert [each.probability for each in chosen.probabilities] == pytest.approx(pair / pair.sum(), rel=1e-5)  # type: ignore[union-attr]
        assert chosen.confidence == pytest.approx(pair.max(), rel=1e-5)  # type: ignore[union-attr]
        assert decision.usage.input_tokens > 0
        messages = [{"role": "user", "content": [{"type": "input_text", "text": TEXTS[0]}]}]
        assert real.openai.decisions.create(
            model=real.model, input=messages, questions=[rating]  # type: ignore[arg-type, list-item]
        ).answers == [rated]  # fmt: skip
        for body, param in (
            ({"questions": [PREDICATE]}, "questions[0]"),
            ({"questions": [{**choice, "choices": [{"value": "good"}, {"value": "great"}]}]}, "questions[0].choices"),
            ({"questions": [{**choice, "choices": [{"value": "good"}] * 2}]}, "questions[0].choices"),
            ({"questions": [choice], "refusal_threshold": 0.5}, "refusal_threshold"),
            ({"questions": [choice], "input": "fox " * 100}, "input"),
            ({"questions": [choice], "input": [{"type": "function_call", "name": "a"}]}, "input[0].content"),
            ({"questions": [choice], "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
             "input[0].content[0].type"),
        ):  # fmt: skip
            answer = real.http.post("/v1/decisions", json={"input": "a", **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
