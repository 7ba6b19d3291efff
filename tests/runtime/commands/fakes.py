"""A stand-in for `LLM` that answers what a function says, one character a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runtime.engine.sampling_params import SamplingParams
from runtime.pooling import PoolingInfo
from runtime.text.formats import AnswerFormat
from runtime.text.pipeline import TextDelta
from tokenizer.templates.template_forms import TemplateForms, forms_of


class FakeTokenizer:
    """One id a character; the template writes `role:content;` for each message, then `assistant:`."""

    has_chat_template = True
    chat_templates = {"default": "<think>"}  # noqa: RUF012

    def template_forms(self, chat_template: str | None = None, *, has_tools: bool = False) -> TemplateForms:
        return forms_of("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:", (), has_tools)

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012

    def chat_template(self, name: str | None = None, *, has_tools: bool = False) -> str:
        return "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:<think>"

    def token_to_id(self, token: str) -> int | None:
        return None

    response_template = None

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], tools: Any = None, add_generation_prompt: bool = True,
        *, tokenize: bool = True, **options: Any,
    ) -> Any:  # fmt: skip
        text = "".join(f"{message['role']}:{message['content']};" for message in messages)
        text += "assistant:" * add_generation_prompt
        return [ord(character) for character in text] if tokenize else text


@dataclass
class FakeLLM:
    """`reply` makes the answer from the prompt's text. Records prompts, and streams closed early."""

    model_path: Path
    reply: Callable[[str], str]
    max_model_len: int = 200
    tokenizer: Any = field(default_factory=FakeTokenizer)
    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    finish_reason: Any = "stop"
    thought: str = ""
    num_stopped: int = 0

    @property
    def client(self) -> Any:
        info = SimpleNamespace(
            model_name="fake",
            model_path=str(self.model_path),
            max_model_len=self.max_model_len,
            device="cpu",
            images=None,
            pooling=PoolingInfo(),
        )
        stats = SimpleNamespace(num_steps=1, prompt_tokens=2, generation_tokens=3, kv_cache_usage=0.25)
        return SimpleNamespace(info=info, stats=lambda: stats)

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.0)

    def stream(
        self, prompt: list[int], params: SamplingParams, *, answer_format: AnswerFormat, lora_request: None
    ) -> Iterator[TextDelta]:
        text = "".join(map(chr, prompt))
        self.prompts.append(text)
        self.params.append(params)
        answer = self.reply(text)
        has_ended = False
        try:
            if answer_format.reasoning:
                yield from (
                    TextDelta(reasoning=character, token_ids=[ord(character)], num_reasoning_tokens=1)
                    for character in self.thought
                )
            for character in answer:
                yield TextDelta(text=character, token_ids=[ord(character)])
            has_ended = True
            yield TextDelta(finish_reason=self.finish_reason)
        finally:
            self.num_stopped += not has_ended
