"""Folders of tiny models that read pictures, with a tokenizer of characters and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models.vision.cases import IMAGE, load_golden, write_golden, write_model
from tests.models.vision.gemma4_cases import CASES as GEMMA4
from tests.models.vision.pixtral_cases import CASES as PIXTRAL_CASES
from tests.models.vision.pixtral_cases import PATCH, merge_size_of
from tests.models.vision.square_cases import GEMMA3

PAD = "<|image_pad|>"

BEGIN, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
"""Gemma's: a picture's tokens, and what stands around them."""

SIGN = "<|image|>"
"""Gemma 4's template writes the token of pictures, without those around it."""

TEMPLATE = (
    "{%- for message in messages %}[{{ message.role }}]"
    "{%- if message.content is string %}{{ message.content }}{% else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{%- endfor %}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)

LETTERS = [chr(code) for code in range(33, 33 + IMAGE)]
LETTERS[1] = "|"  # for a quotation mark
LETTERS[2:6] = "Ċ", "ĊĊ", "ĊĊĊ", "Ġ"  # line ends and a blank


def write_chat_model(folder: Path, case: str = "qwen3_vl") -> Path:
    """A golden model. Qwen's have pictures of 64 to 4,096 pixels, of which 8 x 8 are a token. Empty lines are one token
    of up to three."""
    added, template = {PAD: IMAGE}, TEMPLATE
    if case in GEMMA3:
        write_golden(folder, case, GEMMA3[case])
        added, template = {SOFT: IMAGE, "<unused>": 91, BEGIN: 92, END: 93}, TEMPLATE.replace(PAD, BEGIN)
    elif case in GEMMA4:
        write_golden(folder, case, GEMMA4[case])
        added, template = {SIGN: IMAGE, "<unused>": 91, "<|image>": 92, "<image|>": 93}, TEMPLATE.replace(PAD, SIGN)
        size = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70, "do_normalize": False}
        (folder / "preprocessor_config.json").write_text(json.dumps(size), encoding="utf-8")
    elif case in PIXTRAL_CASES:
        write_golden(folder, case, PIXTRAL_CASES[case])
        added, template = {"[IMG]": IMAGE, "[IMG_END]": 91, "[IMG_BREAK]": 92}, TEMPLATE.replace(PAD, "[IMG]")
        processor = {"patch_size": PATCH, "spatial_merge_size": merge_size_of(case)}
        (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    else:
        write_model(folder, case, load_golden(case).shapes)
        size = {"shortest_edge": 64, "longest_edge": 4096}
        (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 4, "size": size}), encoding="utf-8")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocab = {letter: token_id for token_id, letter in enumerate(LETTERS)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": token_id, "content": content, **flags} for content, token_id in added.items()],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["Ċ Ċ", "ĊĊ Ċ"]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    return folder
