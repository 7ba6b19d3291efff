"""Compiles a tokenizer's loops ahead, and tells whether it has some and whether they are compiled."""

from __future__ import annotations

from pathlib import Path

from runtime.later import later
from tokenizer.bpe.merge_table import MergeTable
from tokenizer.byte_level import BYTE_TO_CHAR
from tokenizer.json_fields import Fields
from tokenizer.loading import TokenizerFiles
from tokenizer.tokenizer import Tokenizer

_cache = later("numba_kernels.cache")


def is_compiled() -> bool:
    """Whether an earlier process has compiled the loops, so that they need no compiler."""
    return any(_cache.cache_folder(Path(__file__).parent / "bpe" / "encode_kernel.py").iterdir())


def has_loops(files: TokenizerFiles) -> bool:
    """Whether a tokenizer runs compiled loops. WordPiece and WordLevel do not, unless their
    normalizer is Unigram's."""
    model = files.tokenizer.get("model")
    has_words = isinstance(model, dict) and model.get("type") in ("WordPiece", "WordLevel")
    return not has_words or "Precompiled" in repr(files.tokenizer.get("normalizer"))


def _byte_level() -> None:
    step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    vocab = {letter: i for i, letter in enumerate(BYTE_TO_CHAR)}
    model = {"type": "BPE", "vocab": vocab | {"ab": 256}, "merges": ["a b"]}
    content = {"version": "1.0", "pre_tokenizer": step, "decoder": step, "model": model}
    Tokenizer(TokenizerFiles(Fields(content, "warm_up"))).encode("ab")


def _merges() -> None:
    """Runs the loops of tokenizers that are not byte-level."""
    MergeTable({"a": 0, "b": 1, "ab": 2}, ["a b"], " ", "").encode(["a", "b"])


LOOPS = (_byte_level, _merges)
"""Each runs compiled loops once, which are read from disk, or compiled, some seconds each."""
