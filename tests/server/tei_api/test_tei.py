"""The shapes of Hugging Face's text-embeddings-inference: the numbers are those of the other routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.encoder_cases import QUERY, TEXTS, expected, write_encoder, write_layout
from tests.server.real_server import Real, serving_real

LONG = "fox " * 100


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with serving_real(write_encoder(tmp_path_factory.mktemp("embedding"), "bert")) as server:
        yield server


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with serving_real(write_encoder(tmp_path_factory.mktemp("ranking"), "bert_pairs")) as server:
        yield server


@pytest.fixture(scope="module")
def labelling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with serving_real(write_encoder(tmp_path_factory.mktemp("labelling"), "modernbert_labels")) as server:
        yield server


def vectors(server: Real, texts: list[str], **fields: Any) -> list[list[float]]:
    answer = server.http.post("/v1/embeddings", json={"input": texts, **fields}).json()
    return [each["embedding"] for each in answer["data"]]


@pytest.mark.parametrize("path", ["/embed", "/"])
def test_embed(embedding: Real, path: str) -> None:
    def ask(**fields: Any) -> Any:
        return embedding.http.post(path, json=fields).json()

    assert ask(inputs=TEXTS) == vectors(embedding, TEXTS)
    assert ask(inputs=QUERY, normalize=False) == vectors(embedding, [QUERY], normalize=False)
    assert np.linalg.norm(ask(inputs=QUERY)) == pytest.approx(1)
    assert ask(inputs=[LONG], truncate=True, truncation_direction="right") == vectors(
        embedding, [LONG], truncate_prompt_tokens=-1
    )
    assert len(ask(inputs=QUERY, dimensions=8)[0]) == 8
    assert isinstance(ask(inputs=QUERY, encoding_format="base64")[0], str)


def test_prompts_that_are_not_pooled(tmp_path: Path) -> None:
    """sentence-transformers' `include_prompt: false`."""
    theirs = {
        name: expected(f"layout without_prompt{suffix}") for name, suffix in (("", ""), ("document", " document"))
    }
    with serving_real(write_layout(tmp_path, "without_prompt")) as server:
        for name, wanted in theirs.items():
            asked = {"prompt_name": name} if name else {}
            embedded = server.http.post("/embed", json={"inputs": TEXTS, **asked}).json()
            np.testing.assert_allclose(embedded, wanted, rtol=1e-5, atol=1e-6)
            assert embedded == vectors(server, TEXTS, **asked)
        asked = {"model": server.model, "input": TEXTS}
        np.testing.assert_allclose(
            server.http.post("/api/embed", json=asked).json()["embeddings"], theirs[""], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_rerank(ranking: Real, path: str) -> None:
    theirs = expected("scores bert_pairs")
    order = np.argsort(-theirs, kind="stable").tolist()
    found = ranking.http.post(path, json={"query": QUERY, "texts": TEXTS}).json()
    assert [each["index"] for each in found] == order
    np.testing.assert_allclose([each["score"] for each in found], theirs[order], rtol=1e-5)
    assert "text" not in found[0]
    raw = ranking.http.post(path, json={"query": QUERY, "texts": TEXTS, "raw_scores": True, "return_text": True}).json()
    np.testing.assert_allclose([1 / (1 + np.exp(-each["score"])) for each in raw], theirs[order], rtol=1e-5)
    assert [each["text"] for each in raw] == [TEXTS[index] for index in order]


def test_predict(labelling: Real) -> None:
    own = labelling.http.post("/classify", json={"input": TEXTS[:2]}).json()["data"]
    found = labelling.http.post("/predict", json={"inputs": [[text] for text in TEXTS[:2]]}).json()
    assert [[each["score"] for each in labels] for labels in found] == [
        sorted(each["probs"], reverse=True) for each in own
    ]
    assert found[0][0]["label"] == own[0]["label"]
    assert labelling.http.post("/predict", json={"inputs": TEXTS[0]}).json() == found[0]
    assert labelling.http.post("/predict", json={"inputs": TEXTS[:1]}).json() == found[0]
    assert labelling.http.post("/", json={"inputs": TEXTS[0]}).json() == [found[0]]
    raw = labelling.http.post("/predict", json={"inputs": TEXTS[0], "raw_scores": True}).json()
    assert sum(each["score"] for each in raw) != pytest.approx(1)
    top = labelling.http.post("/", json={"inputs": TEXTS, "parameters": {"top_k": 1}}).json()
    assert [len(each) for each in top] == [1] * len(TEXTS)


def test_predict_of_pairs(ranking: Real) -> None:
    """A flat list of two is a pair, as text-embeddings-inference reads it."""
    theirs = expected("scores bert_pairs")
    found = ranking.http.post("/predict", json={"inputs": [[QUERY, text] for text in TEXTS]}).json()
    np.testing.assert_allclose([score["score"] for (score,) in found], theirs, rtol=1e-5)
    assert ranking.http.post("/predict", json={"inputs": [QUERY, TEXTS[0]]}).json() == found[0]
    long = ranking.http.post("/predict", json={"inputs": [QUERY, LONG], "truncate": True}).json()
    cut = ranking.http.post("/score", json={"text_1": QUERY, "text_2": LONG, "truncate_prompt_tokens": -1}).json()
    assert long[0]["score"] == cut["data"][0]["score"]


def test_similarity(embedding: Real) -> None:
    given = {"source_sentence": QUERY, "sentences": TEXTS}
    own = embedding.http.post("/similarity", json={"text_1": QUERY, "text_2": TEXTS}).json()["data"]
    assert embedding.http.post("/similarity", json={"inputs": given}).json() == [each["score"] for each in own]


@pytest.mark.parametrize(
    ("kind", "path", "body", "param"),
    [
        ("embedding", "/embed", {"inputs": LONG}, "inputs"),
        ("embedding", "/embed", {"inputs": []}, "inputs"),
        ("embedding", "/embed", {"inputs": [[1, 2]]}, "inputs[0]"),
        ("embedding", "/embed", {"inputs": "a", "dimensions": 4096}, "dimensions"),
        ("embedding", "/embed", {"inputs": "a", "truncate": True, "truncation_direction": "left"},
         "truncation_direction"),
        ("embedding", "/embed", {"inputs": "a", "prompt_name": "unknown"}, "prompt_name"),
        ("embedding", "/", {"inputs": "a", "raw_scores": True}, "raw_scores"),
        ("embedding", "/predict", {"inputs": "a"}, "model"),
        ("embedding", "/rerank", {"query": "a", "texts": ["b"]}, "model"),
        ("embedding", "/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
        ("embedding", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "text_1": "a"}, "text_1"),
        ("embedding", "/similarity", {"inputs": {"source_sentence": LONG, "sentences": ["b"]}},
         "inputs.source_sentence"),
        ("embedding", "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", LONG]}},
         "inputs.sentences[1]"),
        ("embedding", "/similarity", {"text_1": ["a", "b"], "text_2": ["b", LONG]}, "text_2[1]"),
        ("embedding", "/similarity", {"queries": LONG, "documents": ["b", "a"]}, "queries"),
        ("ranking", "/rerank", {"query": "a", "texts": [LONG]}, "texts"),
        ("ranking", "/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "documents"),
        ("ranking", "/rerank", {"query": "a", "texts": ["b"], "top_n": 1}, "top_n"),
        ("ranking", "/rerank", {"query": "a", "documents": ["b"], "raw_scores": True}, "raw_scores"),
        ("ranking", "/rerank", {"query": "a"}, "documents"),
        ("labelling", "/", {"inputs": "a", "dimensions": 4}, "dimensions"),
        ("labelling", "/predict", {"inputs": ["a", "b", "c"]}, "inputs"),
        ("labelling", "/predict", {"inputs": [["a"], []]}, "inputs[1]"),
        ("labelling", "/predict", {"inputs": ["a", ["b"]]}, "inputs"),
        ("labelling", "/predict", {"inputs": [["a"], ["a", "b"]]}, "inputs"),
        ("ranking", "/predict", {"inputs": ["a", LONG]}, "inputs"),
        ("labelling", "/predict", {"inputs": "a", "parameters": {"function_to_apply": "sigmoid"}},
         "parameters.function_to_apply"),
    ],
)  # fmt: skip
def test_wrong_requests(request: pytest.FixtureRequest, kind: str, path: str, body: dict[str, Any], param: str) -> None:
    server: Real = request.getfixturevalue(kind)
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
        ("/api/generate", {"prompt": "x"}),
        ("/v1/decisions", {"input": "x", "questions": [{"type": "predicate", "instructions": "x"}]}),
    ],
)
def test_an_encoder_writes_nothing(embedding: Real, path: str, body: dict[str, Any]) -> None:
    answer = embedding.http.post(path, json={"model": embedding.model, **body})
    assert answer.status_code == 400
    assert "BertModel generates no text: ask for embeddings" in answer.text


def test_ollama_on_an_encoder(embedding: Real) -> None:
    shown = embedding.http.post("/api/show", json={"model": embedding.model}).json()
    assert shown["capabilities"] == ["embedding"]
    found = embedding.http.post("/api/embed", json={"model": embedding.model, "input": TEXTS}).json()
    assert found["embeddings"] == vectors(embedding, TEXTS)
