"""Converts GGUF's metadata to the files of a tokenizer's folder: tokens, merges, special tokens, templates.

All kinds of vocabulary become a `tokenizer.json`: byte-level BPE has its merges in the file, as has Gemma 4's BPE of
characters; SentencePiece's has scores (`tokenizer.sentencepiece`); WordPiece's tokens that begin a word are written
with "▁" in front, its others without "##"; Unigram's are XLM-R's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from tokenizer.components.added_tokens import AddedToken
from tokenizer.ends import known_ends
from tokenizer.errors import TokenizerFileError
from tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS, byte_level
from tokenizer.json_fields import Fields, shown
from tokenizer.loading import TokenizerFiles, refusing_template
from tokenizer.piece_classes import pair_template, unigram_content
from tokenizer.sentencepiece import added_tokens, content_of, spaces_as_marks
from tokenizer.unigram.model import CONTROL, NORMAL, UNUSED
from tokenizer.warn import warn_once

_PREFIX = "tokenizer.ggml."
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
_KINDS = {
    "gpt2": "byte-level BPE", "llama": "SentencePiece", "gemma4": "BPE of characters", "bert": "WordPiece",
    "t5": "Unigram",
}  # fmt: skip
_ENCODERS = ("bert", "modern-bert", "nomic-bert")
"""Architectures whose texts begin and end with a token each, and pairs have them between, too."""
_BEGINS_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "tekken")  # if the file does not say


class GgufVocabulary:
    """The tokenizer's part of the metadata of one file.

    Attributes:
        tokens: by id.
        types: of the tokens, as the file numbers them.

    Raises `TokenizerFileError`, naming file, key and value, for lists of different lengths, a duplicate token, an id
    outside of the vocabulary, and an unsupported model or pre-tokenizer.
    """

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self._metadata, self._file = metadata, file
        kind = self._get("model", str, "")
        if kind not in _KINDS:
            known = ", ".join(f"{name} ({what})" for name, what in _KINDS.items())
            self._fail("model", f"{kind!r} is not supported; supported are {known}")
        self._kind, self._is_sentencepiece, self._is_gemma4 = kind, kind == "llama", kind == "gemma4"
        self._is_encoder = metadata.get("general.architecture") in _ENCODERS
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self._list("tokens"))]
        self._vocab = {token: i for i, token in enumerate(self.tokens)}
        if len(self._vocab) != len(self.tokens) and not self._is_gemma4:  # it has three tokens twice: the later counts
            i = next(i for i, token in enumerate(self.tokens) if self._vocab[token] != i)
            self._fail("tokens", f"{shown(self.tokens[i])} has the ids {i} and {self._vocab[self.tokens[i]]}")
        self.types: list[int] = [NORMAL] * len(self.tokens)
        if _PREFIX + "token_type" in metadata:
            self.types = self._numbers("token_type", (int,))
        if kind == "t5" and self._is_encoder and "<mask>" not in self._vocab:
            # The converter pads a SentencePiece model's tokens, of which XLM-R's mask is none; it comes next.
            for i, token in enumerate(self.tokens):
                if self.types[i] == UNUSED and token.startswith("[PAD"):
                    self.tokens[i], self.types[i] = "<mask>", CONTROL
                    break
        if kind == "bert":
            self.tokens = [
                token if own == CONTROL else token[1:] if token[0] == "▁" and len(token) > 1 else f"##{token}"
                for token, own in zip(self.tokens, self.types, strict=True)
            ]
            self._vocab = {token: i for i, token in enumerate(self.tokens)}

    def end_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: those that the file names, and control tokens known to."""
        named = (self._id(f"{name}_token_id") for name in ("eos", "eot", "eom"))
        control = {i: token for i, token in enumerate(self.tokens) if self.types[i] == CONTROL}
        return known_ends({i: self.tokens[i] for i in named if i is not None}, control)

    def bos_id(self) -> int | None:
        """The id that begins a text, if there is one."""
        return self._id("bos_token_id", 1 if self._is_sentencepiece else None)

    def pad_id(self) -> int | None:
        """The id that fills a batch, if there is one."""
        return self._id("padding_token_id")

    def files(self) -> TokenizerFiles:
        """The equivalent of a folder with a `tokenizer.json`."""
        made = {
            "gemma4": self._characters, "llama": self._sentencepiece, "bert": self._word_piece, "t5": self._unigram,
            "gpt2": self._byte_level,
        }  # fmt: skip
        content = made[self._kind]()
        content["version"] = "1.0"
        content["added_tokens"] = list(self._added_tokens())
        if self._is_encoder:
            content["post_processor"] = self._around()
        files = TokenizerFiles(Fields(content, self._file), passes_over_merges=True)
        for name, key in _NAMED.items():
            default = {"bos": 1, "eos": 2, "unk": 0}.get(name) if self._is_sentencepiece else None
            token_id = self._id(f"{key}_token_id", default)
            if token_id is not None:
                files.named_tokens[f"{name}_token"] = AddedToken(self.tokens[token_id], is_special=True)
        has_bos = self._is_sentencepiece or self._is_gemma4 or self._get("pre", str, "") in _BEGINS_WITH_BOS
        if not self._is_encoder:
            files.add_bos_token = self._get("add_bos_token", bool, has_bos)
            files.add_eos_token = self._get("add_eos_token", bool, False)
        self._add_templates(files)
        return files

    def _added_tokens(self) -> Iterable[dict[str, Any]]:
        # Phi-3's special tokens swallow the blanks after them, which the file does not say.
        strips = self._is_sentencepiece and self._metadata.get("general.architecture") == "phi3"
        strips_right = frozenset(self.tokens) - {"<unk>", "<s>", "<|endoftext|>"} if strips else frozenset()
        # Masks of RoBERTa's kin and ModernBERT swallow the blanks before them, which the file does not say either.
        strips_left = {"<mask>", "[MASK]"} if self._is_encoder and self._kind != "bert" else frozenset()
        return added_tokens(self.tokens, self.types, strips_right, strips_left)

    def _byte_level(self) -> dict[str, Any]:
        name = self._get("pre", str, "")
        if name not in PRE_TOKENIZERS:
            problem = f"{name!r:.80} is not supported" if name else "is missing, and words cannot be cut without it"
            self._fail("pre", f"{problem}; supported are {', '.join(sorted(PRE_TOKENIZERS))}: convert the model anew")
        pre = PRE_TOKENIZERS[name]
        model = {
            "type": "BPE", "vocab": self._vocab, "merges": self._list("merges"), "ignore_merges": pre.ignores_merges,
        }  # fmt: skip
        return {
            "normalizer": pre.normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
            "decoder": byte_level(True),
            "model": model,
        }

    def _sentencepiece(self) -> dict[str, Any]:
        scores = self._numbers("scores", (int, float))
        has_prefix = self._get("add_space_prefix", bool, True)
        unknown = self._id("unknown_token_id", 0)
        return content_of(self.tokens, scores, self.types, unknown=unknown, has_prefix=has_prefix)

    def _word_piece(self) -> dict[str, Any]:
        lowers = self._get("normalizer.lowercase", bool, True)
        unknown = self._id("unknown_token_id", self._vocab.get("[UNK]"))
        if unknown is None:
            self._fail("unknown_token_id", "is missing, and there is no token '[UNK]'")
        return {
            "normalizer": {
                "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                "strip_accents": self._get("normalizer.strip_accents", bool, None), "lowercase": lowers,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {"type": "WordPiece", "vocab": self._vocab, "unk_token": self.tokens[unknown]},
        }  # fmt: skip

    def _unigram(self) -> dict[str, Any]:
        if not self._is_encoder:
            self._fail("model", "'t5' is read of encoders alone (XLM-R's Unigram)")
        charsmap: Any = self._metadata.get(_PREFIX + "precompiled_charsmap")
        if charsmap is not None and not (hasattr(charsmap, "dtype") and charsmap.dtype.itemsize == 1):
            self._fail("precompiled_charsmap", f"must be a list of bytes, found {shown(charsmap)}")
        scores = self._numbers("scores", (int, float))
        return unigram_content(
            list(zip(self.tokens, scores, strict=True)), b"" if charsmap is None else charsmap.tobytes(),
            self._id("unknown_token_id", 3), types=self.types,
            has_prefix=self._get("add_space_prefix", bool, True),
        )  # fmt: skip

    def _around(self) -> dict[str, Any]:
        """The tokens around a text and a pair. Only RoBERTa's kin have two between texts, and no types."""
        first, last = self._id("bos_token_id", self._vocab.get("[CLS]")), self._id("seperator_token_id")
        last = self._id("eos_token_id") if last is None else last
        if first is None or last is None:
            self._fail("bos_token_id" if first is None else "seperator_token_id", "is missing: an encoder needs it")
        is_roberta = self._kind == "t5" or (self._kind == "gpt2" and self._get("pre", str, "") == "roberta-bpe")
        return pair_template(self.tokens[first], first, self.tokens[last], last, is_roberta=is_roberta)

    def _characters(self) -> dict[str, Any]:
        """Gemma 4's: merges of characters, in lines whose blanks are "▁"; bytes encode what has no token."""
        unknown = self._id("unknown_token_id")
        return {
            **spaces_as_marks(),
            "pre_tokenizer": {
                "type": "Split", "pattern": {"Regex": r"\n+|[^\n]+"}, "behavior": "Isolated", "invert": False,
            },
            "model": {
                "type": "BPE", "vocab": self._vocab, "merges": self._list("merges"), "fuse_unk": True,
                "byte_fallback": True, "unk_token": None if unknown is None else self.tokens[unknown],
            },
        }  # fmt: skip

    def _add_templates(self, files: TokenizerFiles) -> None:
        metadata, key = self._metadata, "tokenizer.chat_template"
        names = [name for name in metadata if name == key or name.startswith(key + ".")]
        for name in names:
            template = metadata[name]
            if not isinstance(template, str):
                problem = f"{name}: expected a template, found {shown(template)}"
                warn_once(f"{self._file}: {problem}")
                template = refusing_template(problem)
            files.chat_templates[name[len(key) + 1 :] or "default"] = template

    # Typed access

    def _get(self, name: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(_PREFIX + name, default)
        if value is not default and not isinstance(value, kind):
            self._fail(name, f"must be a {kind.__name__}, found {shown(value)}")
        return value

    def _list(self, name: str) -> list[str]:
        """A list of strings, decoded here if it was not yet."""
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            self._fail(name, "is missing")
        values = [] if isinstance(value, (int, float, str)) else list(value)
        if not values or not isinstance(values[0], str):
            self._fail(name, f"must be a list of strings, found {shown(value)}")
        return values

    def _numbers(self, name: str, kinds: tuple[type, ...]) -> list[Any]:
        """A number for each token."""
        value: Any = self._metadata.get(_PREFIX + name)
        values = value.tolist() if hasattr(value, "tolist") else None
        if values is None or len(values) != len(self.tokens) or not isinstance(values[0], kinds):
            found = f"{len(values)} of them" if isinstance(values, list) else shown(value)
            self._fail(name, f"must have a number for each of {len(self.tokens)} tokens, found {found}")
        return list(values)

    def _id(self, name: str, default: int | None = None) -> int | None:
        value: int | None = self._get(name, int, default)
        if value is None or (_PREFIX + name not in self._metadata and value >= len(self.tokens)):
            return None
        if not 0 <= value < len(self.tokens):
            self._fail(name, f"= {value} is not one of {len(self.tokens)} tokens")
        return int(value)

    def _fail(self, name: str, problem: str) -> NoReturn:
        raise TokenizerFileError(self._file, _PREFIX + name, problem)
