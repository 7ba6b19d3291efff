"""Folders that hold something else than a model in safetensors: each message names the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from models.errors import ConfigError, ModelLoadError, WeightsError
from models.registry import load_model
from tests.models.folders import load_golden, write_model
from tokenizer import Tokenizer
from tokenizer.errors import TokenizerFileError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 3087467144\n"


def only(*names: str, config: bool) -> Callable[[Path], None]:
    """Leaves `config.json`, if wanted, and these files, empty."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        if not config:
            (folder / "config.json").unlink()
        for name in names:
            (folder / name).write_bytes(b"")

    return spoil


def lora(folder: Path) -> None:
    only("adapter_model.safetensors", config=False)(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}))


def begins_with(kind: str, path: str = "") -> Callable[[Path], None]:
    """Leaves what sentence-transformers writes of a model whose first module is of this kind, without a config."""

    def spoil(folder: Path) -> None:
        (folder / "config.json").unlink()
        content = [
            {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.base.modules.{kind.lower()}.{kind}"}
        ]
        (folder / "modules.json").write_text(json.dumps(content))

    return spoil


CASES: list[tuple[Callable[[Path], object], type[ModelLoadError], str]] = [
    (
        lambda folder: (folder / "model.safetensors").write_bytes(POINTER),
        WeightsError,
        "model.safetensors: is a Git LFS pointer, .* run `git lfs pull`",
    ),
    (
        lambda folder: (folder / "config.json").write_bytes(POINTER),
        ConfigError,
        "config.json: is a Git LFS pointer, .* run `git lfs pull`",
    ),
    (
        only("model-Q4_K_M.gguf", config=False),
        ConfigError,
        "config.json: the file is missing; the folder holds model-Q4_K_M.gguf: give that file",
    ),
    (only("model.gguf", config=True), ModelLoadError, "the folder holds model.gguf: give that file"),
    (lora, ConfigError, "is a LoRA adapter of meta-llama/Llama-3.2-1B: merge it into that model"),
    (
        only("pytorch_model.bin", "pytorch_model.bin.index.json", config=True),
        ModelLoadError,
        "pytorch_model.bin cannot be used, since a pickle may run code: save the model as safetensors",
    ),
    (only("consolidated.00.pth", config=True), ModelLoadError, "consolidated.00.pth cannot be used, since a pickle"),
    (only("consolidated.00.pth", "params.json", config=True), ModelLoadError, "convert_llama_weights_to_hf.py"),
    (only("optimizer.pt", "training_args.bin", config=True), ModelLoadError, "index.json; a model is a folder"),
    (only("model.onnx", "tf_model.h5", config=True), ModelLoadError, r"tf_model.h5 \(ONNX, TensorFlow\) cannot"),
    (only("consolidated.safetensors", config=True), ModelLoadError, "consolidated.safetensors has Mistral's own"),
    (
        only("consolidated.safetensors", "params.json", "tekken.json", config=False),
        ConfigError,
        "config.json: the file is missing; .* `convert_hf_to_gguf.py .*model --mistral-format --outfile NEW.gguf`",
    ),
    (begins_with("Router"), ConfigError, "modules.json begins with the module Router, which is not implemented"),
    (begins_with("StaticEmbedding"), ConfigError, "begins with the module StaticEmbedding, which is not implemented"),
    (begins_with("Transformer"), ConfigError, "config.json: the file is missing; a model is a folder with config.json"),
    (
        begins_with("Transformer", "0_Transformer"),
        ConfigError,
        """config.json: the file is missing; .* path = '0_Transformer' must be "": move that folder's files up""",
    ),
    (
        lambda folder: (folder / "config.json").unlink(),
        ConfigError,
        "config.json: the file is missing; a model is a folder with config.json",
    ),
    (only(config=False), ConfigError, "config.json: the file is missing; a model is a folder with config.json"),
    (only(config=True), ModelLoadError, "has neither model.safetensors nor .*; a model is a folder with config.json"),
]


@pytest.mark.parametrize(("spoil", "error", "message"), CASES, ids=[case[2][:40] for case in CASES])
def test_what_to_do_with_a_folder_of_another_kind(
    tmp_path: Path, spoil: Callable[[Path], object], error: type[ModelLoadError], message: str
) -> None:
    folder = write_model(tmp_path / "model", load_golden("llama_default"))
    spoil(folder)
    with pytest.raises(error, match=message):
        load_model(folder)


def test_a_tokenizer_that_is_a_pointer(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", load_golden("llama_default"))
    (folder / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(TokenizerFileError, match=r"tokenizer.json: is a Git LFS pointer, .* run `git lfs pull`"):
        Tokenizer.from_pretrained(folder)
