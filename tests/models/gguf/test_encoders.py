"""Encoders and rerankers in GGUF, as llama.cpp's converter writes them, beside their folders and its vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from models.checkpoints.model_files import open_model
from models.errors import ConfigError
from models.registry import load_config, load_model
from runtime.llm import LLM
from tests.models.driver import relative_error
from tests.models.encoder_cases import IDS, QUERY
from tests.models.gguf import encoder_twins
from tests.models.gguf.encoder_twins import SCRIPTS, TWINS, vectors_of, write_twin, write_twins_gguf
from tests.models.test_encoders import made_of, opened, passes_of
from tokenizer import Tokenizer

__all__ = ["opened"]  # the fixture

Array = np.ndarray[Any, Any]
GELU = 1e-3
"""llama.cpp's GELU is an approximation out of a table of float16; SiLU, NomicBERT's, is exact."""
LLAMA_ERROR = {"nomic_bert": 1e-6}


@pytest.mark.parametrize("name", TWINS)
def test_a_file_is_its_twin(tmp_path: Path, name: str) -> None:
    ours = load_model(write_twins_gguf(tmp_path / "model.gguf", name))
    twin = load_model(write_twin(tmp_path / "twin", name))
    hidden = passes_of(ours)([IDS])
    np.testing.assert_array_equal(hidden, passes_of(twin)([IDS]))
    if twin.classifier is not None:
        np.testing.assert_array_equal(made_of(ours, hidden), made_of(twin, hidden))
    theirs, allowed = vectors_of(name), LLAMA_ERROR.get(name, GELU)
    if "rank 0" in theirs and name != "qwen3_reranker":
        assert relative_error(made_of(ours, hidden), theirs["rank 0"]) <= allowed
    if theirs["ids 0"].ndim == 2:
        assert relative_error(hidden, theirs["ids 0"]) <= allowed


@pytest.mark.parametrize("name", [name for name, (_, _, pooling) in TWINS.items() if pooling])
def test_pooled_vectors(tmp_path: Path, opened: Callable[..., LLM], name: str) -> None:
    llms = [opened(write_twins_gguf(tmp_path / "model.gguf", name)), opened(write_twin(tmp_path / "twin", name))]
    prompts: Any = [{"prompt_token_ids": ids} for ids in (IDS, IDS[:5])]
    ours, twins = (np.array([each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]) for llm in llms)
    np.testing.assert_array_equal(ours, twins)
    theirs = vectors_of(name)
    for at in range(2):
        vector = theirs[f"ids {at}"]
        assert relative_error(ours[at], vector / np.linalg.norm(vector)) <= LLAMA_ERROR.get(name, GELU)


@pytest.mark.parametrize("name", TWINS)
def test_texts_have_the_twins_ids(tmp_path: Path, name: str) -> None:
    """Also pairs, with the types of BERT's."""
    files = open_model(write_twins_gguf(tmp_path / "model.gguf", name)).tokenizer_files()
    assert files is not None
    ours, twin = Tokenizer.from_files(files), Tokenizer.from_pretrained(write_twin(tmp_path / "twin", name))
    for text in SCRIPTS:
        assert ours.encode(text) == twin.encode(text), text
        if not name.startswith(("embedding", "qwen3")):
            pair, expected = ours.encode_pair(QUERY, text), twin.encode_pair(QUERY, text)
            assert pair[0] == expected[0], text
            assert pair[1] == expected[1] or name.startswith("modern"), text  # which has no types


def test_a_reranker_of_qwen3(tmp_path: Path, opened: Callable[..., LLM]) -> None:
    """A file has the head's rows of "yes" and "no" alone, and the prompt of a pair."""
    ours = opened(write_twins_gguf(tmp_path / "model.gguf", "qwen3_reranker"))
    twin = opened(write_twin(tmp_path / "qwen3-reranker", "qwen3_reranker"))
    pairs = QUERY, SCRIPTS[:6]
    scores, expected = ([each.outputs.score for each in llm.score(*pairs, use_tqdm=False)] for llm in (ours, twin))
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    (found,) = ours.classify([{"prompt_token_ids": IDS}], use_tqdm=False)
    theirs = vectors_of("qwen3_reranker")["rank 0"]  # softmax of both
    np.testing.assert_allclose(found.outputs.probs, theirs[:1], rtol=2e-3)
    assert not ours.client.info.pooling.generates


def test_bert_without_its_pooler_cannot_rank(tmp_path: Path) -> None:
    path = write_twins_gguf(tmp_path / "model.gguf", "bert")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "pairs.gguf", "bert")
    for key, field in reader.fields.items():
        if key.startswith("bert."):
            writer.add_key_value(key, field.contents(), field.types[0])
    writer.add_classifier_output_labels(["relevance"])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor("cls.output.weight", np.ones((1, 48), np.float32))
    writer.add_tensor("cls.output.bias", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"classifier.output_labels names labels, but the file lacks the pooler"):
        load_config(tmp_path / "pairs.gguf")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("bert.pooling_type", 7, "bert.pooling_type = 7 must be one of 0, 1, 2, 3, 4"),
        ("bert.attention.causal", True, "bert.attention.causal = True is not supported"),
        ("bert.some_switch", True, "bert.some_switch"),
    ],
)
def test_wrong_metadata_is_refused_by_name(
    tmp_path: Path, opened: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    kept = json.loads((encoder_twins.FOLDER / "bert.json").read_text(encoding="utf-8"))
    kept["metadata"][key] = ["BOOL" if isinstance(value, bool) else "UINT32", value]
    (folder / "bert.json").write_text(json.dumps(kept), encoding="utf-8")
    monkeypatch.setattr(encoder_twins, "FOLDER", folder)
    with pytest.raises(ConfigError, match=message):
        opened(write_twins_gguf(tmp_path / "model.gguf", "bert"))
