"""A tokenizer whose ids are bytes, so that a test can cut a character in two; with three special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizer import Tokenizer

END_OF_TURN = 258
"""The id that ends an answer; 256 begins a turn, 257 begins a text."""

TEMPLATE = (
    "{%- if tools %}TOOLS{{ tools | tojson }}{% endif -%}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' and not message.content %}"
    "{{ raise_exception('a tool must answer') }}{% endif %}"
    "<s>{{ message.role }}:{{ message.content }}"
    "{%- for call in message.tool_calls %}CALL{{ call.function.arguments | tojson }}{% endfor %}</s>"
    "{%- endfor %}"
    "{%- if flavour %}[{{ flavour }}]{% endif %}"
    "{%- if add_generation_prompt %}<s>assistant:{% endif %}"
)


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


def write_byte_tokenizer(folder: Path, *, has_template: bool = True, template: str = TEMPLATE) -> None:
    """tokenizer.json and tokenizer_config.json."""
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    special = {"<s>": 256, "<text>": 257, "</s>": END_OF_TURN}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = {"bos_token": "<text>", "eos_token": "</s>"}
    if has_template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def make_byte_tokenizer(folder: Path, *, has_template: bool = True) -> Tokenizer:
    write_byte_tokenizer(folder, has_template=has_template)
    return Tokenizer.from_pretrained(folder)
