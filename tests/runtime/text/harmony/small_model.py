"""A small vocabulary that has harmony's special tokens, and a template that writes what gpt-oss's writes."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory

from runtime.text.harmony.message import SPECIAL_TOKENS, SpecialIds, special_ids
from tests.runtime.text.tokenizers import byte_level_content, special, write
from tokenizer import Tokenizer
from tokenizer.loading import Path, read_folder

TEMPLATE = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: {{ strftime_now('%Y-%m-%d') }}\n\n"
    "Reasoning: {{ reasoning_effort or 'medium' }}\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@cache
def small_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """Bytes and a few words; the special tokens in another order than gpt-oss has them."""
    content = byte_level_content()
    first = content["added_tokens"][0]["id"] + 1
    content["added_tokens"] += [special(first + i, token) for i, token in enumerate(sorted(SPECIAL_TOKENS))]
    with TemporaryDirectory() as folder:
        write(Path(folder), content)
        files = read_folder(Path(folder))
    files.chat_templates = {"default": template}
    return Tokenizer.from_files(files)


def small_ids() -> SpecialIds:
    ids = special_ids(small_tokenizer())
    assert ids is not None
    return ids


def ids_of(text: str) -> list[int]:
    """With special tokens where the text has theirs."""
    return small_tokenizer().encode(text, add_special_tokens=False)
