"""Scores, ranks and labels of models with a classifier, over HTTP, against sentence-transformers' and transformers'."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.encoder_cases import IDS, QUERY, TEXTS, expected, write_encoder
from tests.server.real_server import Real, serving_real

LONG = ["fox " * 100, "x", "The fox is in the den. " * 5]
LONG_SCORES = [0.39857473969459534, 0.3481973111629486, 0.3560399115085602]


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder: Path = write_encoder(tmp_path_factory.mktemp("ranking"), "bert_pairs")
    with serving_real(folder) as server:
        yield server


@pytest.fixture(scope="module")
def labelling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder: Path = write_encoder(tmp_path_factory.mktemp("labelling"), "modernbert_labels")
    with serving_real(folder) as server:
        yield server


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores(ranking: Real, path: str) -> None:
    theirs = expected("scores bert_pairs")
    answer = ranking.http.post(path, json={"text_1": QUERY, "text_2": TEXTS}).json()
    np.testing.assert_allclose([each["score"] for each in answer["data"]], theirs, rtol=1e-5)
    pairs = {"queries": [QUERY] * 2, "documents": TEXTS[1:3]}
    answer = ranking.http.post(path, json=pairs).json()
    np.testing.assert_allclose([each["score"] for each in answer["data"]], theirs[1:3], rtol=1e-5)
    raw = ranking.http.post(path, json={**pairs, "use_activation": False}).json()
    np.testing.assert_allclose([1 / (1 + np.exp(-each["score"])) for each in raw["data"]], theirs[1:3], rtol=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/rerank/", "/v2/rerank"])
def test_ranking(ranking: Real, path: str) -> None:
    theirs = expected("scores bert_pairs")
    order = np.argsort(-theirs, kind="stable").tolist()
    body = {"model": ranking.model, "query": QUERY, "documents": TEXTS}
    answer = ranking.http.post(path, json=body).json()
    assert [each["index"] for each in answer["results"]] == order
    np.testing.assert_allclose([each["relevance_score"] for each in answer["results"]], theirs[order], rtol=1e-5)
    if path == "/v2/rerank":
        assert answer["meta"]["billed_units"] == {"search_units": 1}
    else:
        assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[i] for i in order]
    assert len(ranking.http.post(path, json={**body, "top_n": 2}).json()["results"]) == 2


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/rerank", {"query": "fox " * 100, "documents": ["x"]}, "query"),
        ("/rerank", {"query": "fox " * 100, "texts": ["x"]}, "query"),
        ("/score", {"text_1": ["x", "fox " * 100], "text_2": ["x", "x"]}, "text_1"),
        ("/score", {"queries": "fox " * 100, "documents": "x"}, "queries"),
        ("/score", {"queries": "x", "documents": ["x", "fox " * 100]}, "documents[1]"),
        ("/score", {"text_1": "fox " * 40, "text_2": "fox " * 40}, "text_2"),
    ],
)
def test_the_text_that_is_too_long_is_named(ranking: Real, path: str, more: dict[str, Any], param: str) -> None:
    refused = ranking.http.post(path, json={"model": ranking.model, **more})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert "maximum context length is 64 tokens" in refused.json()["error"]["message"]


def test_long_documents(ranking: Real) -> None:
    body = {"query": QUERY, "documents": ["fox " * 100, "x"]}
    refused = ranking.http.post("/rerank", json=body)
    assert refused.status_code == 400
    assert "maximum context length is 64 tokens" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "documents[0]"
    cut = ranking.http.post("/rerank", json={**body, "truncate_prompt_tokens": -1}).json()
    assert len(cut["results"]) == 2
    cohere = ranking.http.post("/v2/rerank", json={**body, "model": ranking.model}).json()
    assert [each["relevance_score"] for each in cohere["results"]] == [
        each["relevance_score"] for each in cut["results"]
    ]


def test_a_long_query_is_cut_as_sentence_transformers_does(ranking: Real) -> None:
    """`CrossEncoder.predict` of the same folder gave these scores."""
    for path, more in (
        ("/rerank", {"documents": LONG, "truncate_prompt_tokens": -1}),
        ("/rerank", {"texts": LONG, "truncate": True}),
        ("/v2/rerank", {"documents": LONG}),
    ):
        answer = ranking.http.post(path, json={"model": ranking.model, "query": "the dog " * 100, **more}).json()
        results = answer if "texts" in more else answer["results"]
        scores = {each["index"]: each.get("relevance_score", each.get("score")) for each in results}
        np.testing.assert_allclose([scores[i] for i in range(len(LONG))], LONG_SCORES, rtol=1e-5)


def test_labels(labelling: Real) -> None:
    theirs = np.exp(expected("modernbert_labels"))
    probs = theirs / theirs.sum()
    (found,) = labelling.http.post("/classify", json={"input": [IDS]}).json()["data"]
    np.testing.assert_allclose(found["probs"], probs, rtol=1e-4)
    assert (found["label"], found["num_classes"]) == (f"label {probs.argmax()}", 3)
    (raw,) = labelling.http.post("/pooling", json={"input": [IDS], "task": "classify", "use_activation": False}).json()[
        "data"
    ]
    np.testing.assert_allclose(raw["data"], expected("modernbert_labels"), rtol=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_labels_are_no_scores_and_no_text(labelling: Real, path: str, body: dict[str, object]) -> None:
    answer = labelling.http.post(path, json={"model": labelling.model, **body})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "cannot rank" in message or "generates no text" in message or "chat template" in message


def test_labels_of_tokens(tmp_path: Path) -> None:
    """`token_classify` is the usual task of a model that labels tokens, which has no labels of texts."""
    with serving_real(write_encoder(tmp_path, "bert_tokens")) as server:
        (data,) = server.http.post("/pooling", json={"input": [IDS], "use_activation": False}).json()["data"]
        np.testing.assert_allclose(data["data"], expected("bert_tokens"), rtol=1e-4, atol=1e-5)
        (data,) = server.http.post("/pooling", json={"input": [IDS], "task": "token_embed"}).json()["data"]
        assert np.array(data["data"]).shape == (len(IDS), 48)
        body = {"input": [IDS], "task": "token_embed", "encoding_format": "base64"}
        (encoded,) = server.http.post("/pooling", json=body).json()["data"]
        rows = np.frombuffer(base64.b64decode(encoded["data"]), "<f4").reshape(len(IDS), 48)
        np.testing.assert_array_equal(rows, np.array(data["data"], np.float32))
        for path, wanted in (("/classify", "model"), ("/pooling", "task")):
            more = {"task": "classify"} if path == "/pooling" else {}
            refused = server.http.post(path, json={"input": [IDS], **more})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == wanted
            assert "it labels tokens (task token_classify), not texts" in refused.json()["error"]["message"]


def test_spans_of_answers(tmp_path: Path) -> None:
    with serving_real(write_encoder(tmp_path, "bert_spans")) as server:
        body = {"text_1": QUERY, "text_2": TEXTS[:2]}
        for number, each in enumerate(server.http.post("/pooling", json=body).json()["data"]):
            np.testing.assert_allclose(each["data"], expected(f"spans {number}"), rtol=1e-4, atol=1e-5)
        refused = server.http.post("/pooling", json={**body, "input": "x"})
        assert refused.json()["error"]["param"] == "input"
        refused = server.http.post("/pooling", json={"text_1": "x"})
        assert refused.json()["error"]["param"] == "text_2"
