"""The commands over a GGUF file: the bundled model, written as llama.cpp's converter would write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from models.checkpoints.hub import BUNDLED_MODEL
from models.checkpoints.weight_files import open_checkpoint
from runtime.llm import LLM
from tests.models.gguf.files import write_gguf
from tests.runtime.commands.running import STORIES, invoke, needs_stories
from tests.server.running import serving_process
from tests.tokenizer.gguf_metadata import byte_level_metadata, sentencepiece_metadata
from tests.waiting import TIMEOUT_S
from tokenizer import Tokenizer

QUESTIONS = "What is 17 plus 25?\nReverse the word planet\nWhat is the capital of France?\n"


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """As `_set_vocab_gpt2` of the converter."""
    metadata = byte_level_metadata(BUNDLED_MODEL, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"][:640])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"].tolist()[:640])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(635)
    writer.add_pad_token_id(639)
    writer.add_add_bos_token(False)
    writer.add_chat_template((BUNDLED_MODEL / "chat_template.jinja").read_text())
    writer.add_key_value("general.sampling.temp", 0.0, gguf.GGUFValueType.FLOAT32)


def demo(path: Path, ggml: Ggml) -> Path:
    """The bundled model in a file whose matrices are of this type."""
    config: dict[str, Any] = json.loads((BUNDLED_MODEL / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    checkpoint = open_checkpoint(BUNDLED_MODEL)
    tensors = {name: checkpoint[name].array().astype(np.float32) for name in checkpoint.tensors}
    return write_gguf(path, config, tensors, type_of=lambda name: ggml, add_metadata=add_vocabulary)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo(tmp_path_factory.mktemp("gguf") / "demo-BF16.gguf", Ggml.BF16)


def test_chat_answers_as_the_model_that_it_was_made_of(whole: Path, tmp_path: Path) -> None:
    expected = invoke("chat", stdin=QUESTIONS)
    assert expected[1].startswith("42\n")
    assert invoke("chat", "--model", str(whole), stdin=QUESTIONS) == expected
    q8 = demo(tmp_path / "demo-Q8_0.gguf", Ggml.Q8_0)
    assert invoke("chat", "-m", str(q8), stdin="What is 17 plus 25?\n")[:2] == (0, "42\n")


def test_another_chat_template_goes_over_the_files_own(whole: Path, tmp_path: Path) -> None:
    template = tmp_path / "short.jinja"
    template.write_text("<|user|>{{ messages[-1].content }} 17 plus 25?<|end|>\n<|assistant|>")
    own = Tokenizer.from_pretrained(BUNDLED_MODEL)
    expected = own.encode("<|user|>What is 17 plus 25?<|end|>\n<|assistant|>", add_special_tokens=False)
    for given in (str(template), template.read_text()):
        with LLM(whole, chat_template=given) as llm:
            assert llm.chat_prompt([{"role": "user", "content": "What is"}]) == expected
    output = invoke("generate", "-m", str(whole), "--chat", "-p", "What is", "--chat-template", str(template), "--json")
    assert json.loads(output[1])["prompt_token_ids"] == expected
    status, _, error = invoke("chat", "-m", str(whole), "--chat-template", str(tmp_path / "none.jinja"), stdin="x\n")
    assert (status, "none.jinja: cannot be read as a chat template" in error) == (2, True)
    status, _, error = invoke("chat", "-m", str(whole), "--chat-template", "{% if %}", stdin="x\n")
    assert (status, "the chat template does not compile" in error) == (2, True)


def test_info_shows_bytes_by_format(whole: Path) -> None:
    report = json.loads(invoke("info", "-m", str(whole), "--json")[1])
    assert report["model"]["name"] == "demo-BF16"
    assert (report["model"]["architecture"], report["model"]["dtype"]) == ("Qwen3ForCausalLM", "bfloat16")
    num_norms = 4 * (2 * 256 + 2 * 32) + 256
    checkpoint = open_checkpoint(BUNDLED_MODEL)
    num_all = sum(checkpoint[name].array().size for name in checkpoint.tensors)
    assert report["stored_bytes"] == {"BF16": 2 * (num_all - num_norms), "F32": 4 * num_norms}
    assert "stored tensors\n  BF16 " in invoke("info", "-m", str(whole))[1]
    assert json.loads(invoke("info", "--json")[1])["stored_bytes"] == {"BF16": 2 * num_all}


def test_tokenize(whole: Path) -> None:
    arguments = ("tokenize", "--json", "Hello<|end|> 123")
    assert invoke(*arguments, "-m", str(whole)) == invoke(*arguments)


def test_recommended_sampling_and_ends_are_the_files(whole: Path) -> None:
    with LLM(whole) as llm:
        assert llm.client.info.eos_token_ids == (635,)
        assert llm.default_sampling_params().temperature == 0.0


def test_serve(whole: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is 17 plus 25?"}]}
    with serving_process(whole, {"load_format": "auto"}) as (_, url), httpx.Client(timeout=TIMEOUT_S) as http:
        answer = http.post(f"{url}/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "42"
        assert http.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"


def test_errors_are_one_line(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole.read_bytes()[:200_000])
    status, out, error = invoke("chat", "-m", str(path), stdin="x\n")
    assert (status, out) == (2, "")
    assert error.startswith("xserv: error: ")
    assert "cut.gguf: tensor 'token_embd.weight' ends at byte" in error
    assert len(error.splitlines()) == 1


@needs_stories
def test_a_sentencepiece_model_in_every_form(tmp_path: Path) -> None:
    """stories260K: the same ids, and the same continuation, from float32; a story from what is smaller."""
    config = json.loads((STORIES / "config.json").read_text())
    config.setdefault("rope_parameters", {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": "default"})
    checkpoint = open_checkpoint(STORIES)
    tensors = {name: np.array(checkpoint[name].array()) for name in checkpoint.tensors}
    metadata = sentencepiece_metadata(STORIES)

    def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(metadata["tokenizer.ggml.tokens"][: config["vocab_size"]])
        writer.add_token_scores(metadata["tokenizer.ggml.scores"].tolist()[: config["vocab_size"]])
        writer.add_token_types(metadata["tokenizer.ggml.token_type"].tolist()[: config["vocab_size"]])

    arguments = ("--temperature", "0", "--max-tokens", "40", "-p", "Once upon a time, Lily", "--json")
    expected = json.loads(invoke("generate", "-m", str(STORIES), *arguments)[1])
    for ggml in (Ggml.F32, Ggml.Q8_0):
        path = tmp_path / f"stories-{ggml.name}.gguf"

        def type_of(name: str, ggml: Ggml = ggml) -> Ggml:
            return Ggml.F32 if "ffn_down" in name else ggml  # its rows are no whole blocks

        write_gguf(path, config, tensors, type_of=type_of, add_metadata=add_sentencepiece)
        status, out, error = invoke("generate", "-m", str(path), *arguments)
        assert status == 0, error
        found = json.loads(out)
        assert found["prompt_token_ids"] == expected["prompt_token_ids"]
        if ggml == Ggml.F32:
            assert found["text"] == expected["text"]
        assert found["text"][:20] == expected["text"][:20]
