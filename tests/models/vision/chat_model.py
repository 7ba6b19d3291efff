"""A folder of a tiny model that reads pictures, with a tokenizer of characters and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models.vision.cases import IMAGE, load_golden, write_model

PAD = "<|image_pad|>"

TEMPLATE = (
    "{%- for message in messages %}[{{ message.role }}]"
    "{%- if message.content is string %}{{ message.content }}{% else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{%- endfor %}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def write_chat_model(folder: Path) -> Path:
    """The golden Qwen3-VL, with pictures of 64 to 4,096 pixels; a token is 8 x 8 of them."""
    write_model(folder, "qwen3_vl", load_golden("qwen3_vl").shapes)
    size = {"shortest_edge": 64, "longest_edge": 4096}
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 4, "size": size}))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    letters = [chr(code) for code in range(33, 33 + IMAGE)]
    letters[1] = "|"  # for a quotation mark
    vocab = {letter: token_id for token_id, letter in enumerate(letters)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": IMAGE, "content": PAD, **flags}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder
