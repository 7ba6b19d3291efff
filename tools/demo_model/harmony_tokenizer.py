"""The tokenizer of the demo model with experts: byte-level BPE with single digits, and harmony's special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.text.harmony.message import SPECIAL_TOKENS
from tools.demo_model.tokenizer import PATTERN

PAD = "<|endoftext|>"

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- raise_exception('this template writes no tools: xserv renders them itself, as harmony has them') -}}
{%- endif -%}
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n' -}}
{{- 'Knowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') -}}
{{- '\\n\\nReasoning: ' + (reasoning_effort or 'medium') -}}
{{- '\\n\\n# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' -}}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}
{{- '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '<|end|>' -}}
{%- elif message.role == 'user' -%}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
{%- else -%}
{{- raise_exception('this template knows system, developer, user and assistant messages, not ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""


def build_tokenizer(texts: list[str], vocab_size: int, special: Sequence[str] = (PAD, *SPECIAL_TOKENS)) -> Tokenizer:
    """256 bytes, merges, then the special tokens: exactly `vocab_size` ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special), show_progress=False, min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    assert found == vocab_size - len(special), f"the texts give {found} tokens, not {vocab_size - len(special)}"
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def kept_tokenizer(
    kept: Path, texts: Callable[[], list[str]], vocab_size: int, special: Sequence[str] = (PAD, *SPECIAL_TOKENS)
) -> Tokenizer:
    """The tokenizer beside a checkpoint, or a new one, which is saved there."""
    if not kept.exists():
        build_tokenizer(texts(), vocab_size, special).save(str(kept))
    found: Tokenizer = Tokenizer.from_file(str(kept))
    return found
