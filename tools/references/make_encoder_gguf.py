"""Keeps the metadata that llama.cpp's converter writes for encoders and rerankers, and llama.cpp's vectors of them.

    python -m tools.references.make_encoder_gguf LLAMA_CPP LLAMA_PYTHON     # needs torch, transformers, sentencepiece

`LLAMA_CPP` is a checkout, whose `convert_hf_to_gguf.py` runs here; `LLAMA_PYTHON` has `llama_cpp`. `tests/models/
gguf/encoders` gets tokenizers, the files' metadata, which of the folder's tensors each tensor is, and `vectors.npz`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.models.encoder_cases import IDS
from tests.models.gguf.encoder_twins import FOLDER, SCRIPTS, TWINS, behind, changed, write_twin

CONVERT = """
import sys
source, pre = sys.argv[1:3]
sys.path[:0] = [source + "/gguf-py", source]
from conversion import base
if pre:  # else known by a hash of a published tokenizer's ids
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
import convert_hf_to_gguf
sys.argv = ["convert", *sys.argv[3:]]
convert_hf_to_gguf.main()
"""
EMBED = Path(__file__).with_name("llama_vectors.py")
PRE = {"bert": "jina-v2-en", "roberta_labels": "roberta-bpe", "nomic_bert": "nomic-bert", "qwen3_embedding": "gpt-2",
       "qwen3_reranker": "gpt-2", "modernbert": "modern-bert", "modernbert_labels": "modern-bert"}  # fmt: skip
POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}


def main() -> None:
    source, python = sys.argv[1:]
    FOLDER.mkdir(exist_ok=True)
    write_tokenizers()
    vectors: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (_, _, pooling) in TWINS.items():
            folder = write_twin(Path(scratch) / name.replace("_reranker", "-reranker"), name)
            if name == "nomic_bert":
                as_published(folder)
            made = Path(scratch) / f"{name}.gguf"
            command = [sys.executable, "-c", CONVERT, source, PRE.get(name, ""), str(folder), "--outfile", str(made)]
            more = ["--sentence-transformers-dense-modules"] if name == "embedding_gemma" else []
            subprocess.run(
                [*command, "--outtype", "f32", *more], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            keep(name, made)
            asked = {"ids": POOLINGS.get(pooling, 0)} | (
                {"rank": 4} if "labels" in name or "rerank" in name or "pairs" in name else {}
            )
            for kind, number in asked.items():
                request = json.dumps({"path": str(made), "prompts": [IDS, IDS[:5]], "pooling": number})
                done = subprocess.run(
                    [python, str(EMBED)], input=request, capture_output=True, encoding="utf-8", check=True
                )
                answer = json.loads(done.stdout)
                for at, rows in enumerate(answer["vectors"]):
                    vectors[f"{name} {kind} {at}"] = np.array(rows, np.float32)
    np.savez_compressed(FOLDER / "vectors.npz", **vectors)


def as_published(folder: Path) -> None:
    """NomicBERT's first names, which the converter reads; transformers' own beside them."""
    from safetensors.numpy import load_file, save_file

    tensors, older = load_file(folder / "model.safetensors"), {}
    for name, array in tensors.items():
        if ".self_attn.q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            older[name.replace("self_attn.q_proj", "attn.Wqkv")] = np.concatenate(parts)
            continue
        for new, old in (
            ("embeddings.LayerNorm", "emb_ln"), ("self_attn.o_proj", "attn.out_proj"), ("up_proj", "fc11"),
            ("gate_proj", "fc12"), ("mlp.down_proj", "mlp.fc2"), ("post_attention_layernorm", "norm1"),
            ("post_mlp_layernorm", "norm2"),
        ):  # fmt: skip
            name = name.replace(new, old)
        if ".self_attn." not in name:
            older[name] = array
    save_file(
        {name.replace("layers.", "encoder.layers."): array for name, array in older.items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {
        "n_embd": 48, "n_head": 4, "n_inner": 80, "n_layer": 2, "n_positions": 2048, "max_trained_positions": 2048,
        "activation_function": "swiglu", "causal": False, "prenorm": False, "qkv_proj_bias": False,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_emb_base": 1000,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def keep(name: str, made: Path) -> None:
    """Keeps a file's metadata, and finds each of its tensors among the folder's by its numbers."""
    import gguf

    reader, tensors = gguf.GGUFReader(made), behind(name)
    metadata: dict[str, Any] = {}
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "general.")):
            continue
        value, kind = field.contents(), field.types[-1].name
        metadata[key] = [kind, "charsmap" if key.endswith("charsmap") else value]
    found = {tensor.name: find(tensor.data, tensors) for tensor in reader.tensors}
    kept = {"architecture": reader.fields["general.architecture"].contents(), "metadata": metadata, "tensors": found}
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, ensure_ascii=False) + "\n", encoding="utf-8")


def find(data: Any, tensors: dict[str, Any]) -> tuple[str, str]:
    stacks = [
        " ".join(name.replace("q_proj", f"{part}_proj") for part in "qkv") for name in tensors if "q_proj" in name
    ]
    ways = [(name, change) for name in tensors for change in ("as it is", "plus 1", "cut 2", "rows 3 4")]
    for source, change in [*ways, *((each, "stack") for each in stacks)]:
        if change.startswith("rows") and len(tensors[source]) < 5:
            continue
        array = changed(tensors, source, change)
        if array.shape == data.shape and np.array_equal(array, data):
            return source, change
    raise ValueError("a tensor of the file is none of the folder's")


def write_tokenizers() -> None:
    bert = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", AddedToken("[MASK]", lstrip=True, normalized=False, special=True)]
    around = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    write_bpe("modernbert", bert, around, normalizers.NFC())
    roberta = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, normalized=False, special=True)]
    write_bpe("roberta", roberta, processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False))
    write_bpe("qwen3", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "yes", "no"])
    write_gemma()


def write_bpe(name: str, special: list[Any], around: Any = None, normalizer: Any = None) -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(SCRIPTS, trainer)
    if around is not None:
        made.post_processor = around
    made.save(str(FOLDER / f"tokenizer_{name}.json"))


def write_gemma() -> None:
    """A SentencePiece model with bytes and without a blank in front, as Gemma 3's."""
    with tempfile.TemporaryDirectory() as scratch:
        SentencePieceTrainer.train(
            sentence_iterator=iter([text for text in SCRIPTS if text.isascii()] * 9), model_type="bpe", vocab_size=360,
            model_prefix=f"{scratch}/gemma", pad_id=0, eos_id=1, bos_id=2, unk_id=3, bos_piece="<bos>",
            eos_piece="<eos>", byte_fallback=True, add_dummy_prefix=False, remove_extra_whitespaces=False,
            normalization_rule_name="identity", hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        shutil.copy(f"{scratch}/gemma.model", FOLDER / "gemma.model")


if __name__ == "__main__":
    main()
