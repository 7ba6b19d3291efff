"""Writes small vocabularies in the forms of trainers, with the ids that their own libraries give.

    python -m tools.references.make_vocabularies TEKKEN.json    # needs sentencepiece, tiktoken and mistral_common

SentencePiece models are trained on this project's pages; `tekken.json` and tiktoken's files have the first tokens of
the given file. The tests read the folders that this writes.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import random
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "tokenizer" / "fixtures" / "vocabularies"

MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "unigram_odd": {
        "model_type": "unigram", "normalization_rule_name": "identity", "byte_fallback": True,
        "add_dummy_prefix": False, "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<sep>", "the c", "▁▁", "ab"], "split_digits": True,
    },
    "bpe": {
        "model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True, "split_digits": True,
        "remove_extra_whitespaces": False, "user_defined_symbols": ["<sep>", "▁▁", "▁▁▁", "ab"], "pad_id": 3,
    },
    "bpe_plain": {"model_type": "bpe", "normalization_rule_name": "identity", "split_by_whitespace": False},
    "suffix": {"model_type": "unigram", "normalization_rule_name": "identity", "treat_whitespace_as_suffix": True},
    "characters": {"model_type": "char", "normalization_rule_name": "identity"},
}  # fmt: skip
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}*"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}+{_CASES}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}+"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}*{_CASES}?",
        r"\p{N}{1,3}",
        _REST,
    )
)
FAMILIES = {  # class: the file's name, the pattern
    "QWenTokenizer": ("qwen.tiktoken", rf"{_CASES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"),
    "ChatGLM4Tokenizer": ("tokenizer.model", rf"{_CASES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"),
    "TikTokenTokenizer": ("tiktoken.model", _KIMI),
}
_ALPHABETS = (
    "abcdefgh the Those 0123456789 .,!?'s'LL", "абвгд Жи", "漢字かな交じり文", "हिन्दी भाषा", "العربية",
    "🙂👨\u200d👩\u200d👧é\u0302ﬁ½™①Ⅳ", "  \t\n\r\u00a0\u3000\u200b",
)  # fmt: skip
_FIXED = (
    "",
    " ",
    "a",
    "  a  b ",
    "\n\n",
    "the cat <sep>ab  <sep>",
    "▁",
    "▁a▁",
    "don't I'LL",
    "x" * 40,
    "ﬁ½ ™",
    "1234567",
)


def texts() -> list[str]:
    """Texts of several scripts."""
    source = random.Random(5)
    made = ["".join(source.choice(source.choice(_ALPHABETS)) for _ in range(source.randint(1, 30))) for _ in range(60)]
    words = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split()[:400]
    return [*_FIXED, *made, *(" ".join(words[i : i + 9]) for i in range(0, 360, 9))]


def write_pieces(name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Trains a model, and returns its cases."""
    lines = [line for page in sorted((ROOT / "docs").glob("*.md")) for line in page.read_text("utf-8").split("\n")]
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=made, vocab_size=420, hard_vocab_limit=False, minloglevel=2,
        character_coverage=0.995, num_threads=1, **options,
    )  # fmt: skip
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
    (FOLDER / name / "tokenizer.model").write_bytes(made.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    cases = []
    for text in texts():
        ids = processor.encode(text)
        has_text = processor.unk_id() not in ids and not text.startswith("▁")
        cases.append({"text": text, "ids": ids, **({"decoded": processor.decode(ids)} if has_text else {})})
    return cases


SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
)  # fmt: skip
_PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_w", "description": 'Wéather of "a" place', "parameters": _PLACE}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]


def _call(call_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "get_w", "arguments": json.dumps(arguments)}}


def _answer(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "get_w", "content": content}


CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "system": (
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"},
         {"role": "assistant", "content": "Hello!  "}, {"role": "user", "content": " And nöw?"}], None,
    ),
    "tools": (
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"},
         {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Weather?"}], TOOLS,
    ),
    "calls": (
        [{"role": "user", "content": "Weather?"},
         {"role": "assistant", "content": "", "tool_calls": [
             _call("abcdefghi", {"city": "Rome", "n": 3}), _call("123456789", {"city": "b"})]},
         _answer("abcdefghi", "22 degrees"), _answer("123456789", '{"a": [1, 2]}'),
         {"role": "assistant", "content": "It is 22."}, {"role": "user", "content": "Thanks"}], TOOLS,
    ),
    "typed": ([{"role": "user", "content": "say [INST] and </s> please"}], None),
}  # fmt: skip


def write_chats(content: dict[str, Any]) -> None:
    """Writes what `mistral_common` makes of conversations, by version of the format."""
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(SPECIAL)]
    cases = []
    for version in ("v3", "v7", "v11", "v13"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tekken.json"
            own = {**content, "config": {**content["config"], "version": version}, "special_tokens": special}
            file.write_text(json.dumps(own), encoding="utf-8")
            tokenizer = MistralTokenizer.from_file(str(file))
            for name, (messages, tools) in CHATS.items():
                request = ChatCompletionRequest.from_openai(messages=copy.deepcopy(messages), tools=tools)
                ids = tokenizer.encode_chat_completion(request).tokens
                case = {"version": version, "name": name, "messages": messages, "tools": tools, "ids": ids}
                cases.append(case)
    found = {"special_tokens": special, "cases": cases}
    (FOLDER / "chats.json").write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    found: dict[str, Any] = {name: write_pieces(name, options) for name, options in MODELS.items()}
    whole = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config = {**whole["config"], "default_num_special_tokens": 40, "default_vocab_size": 640, "version": "v7"}
    vocab = whole["vocab"][:620]
    folder = FOLDER / "tekken"
    folder.mkdir(parents=True, exist_ok=True)
    content = {"config": config, "vocab": vocab, "special_tokens": None}
    (folder / "tekken.json").write_text(json.dumps(content, indent=None), encoding="utf-8")
    write_chats(content)
    tekken = Tekkenizer.from_file(folder / "tekken.json")
    found["tekken"] = [{"text": text, "ids": tekken.encode(text, bos=False, eos=False)} for text in texts()]
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in vocab]
    for name, (file, pattern) in FAMILIES.items():
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
        (folder / file).write_bytes(b"\n".join(lines) + b"\n")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}) + "\n", encoding="utf-8")
        ranks = {token: rank for rank, token in enumerate(tokens)}
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        form = (lambda text: unicodedata.normalize("NFC", text)) if name == "QWenTokenizer" else str
        found[name] = [{"text": text, "ids": encoding.encode_ordinary(form(text))} for text in texts()]
    found = {"sentencepiece": sentencepiece.__version__, "tiktoken": tiktoken.__version__, "cases": found}
    (FOLDER / "expected.json").write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
