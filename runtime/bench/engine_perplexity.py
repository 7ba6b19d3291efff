"""A text's perplexity by the engine's own prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from runtime.bench.perplexity import Window, summary, window_and_stride, windows
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import InvalidArgumentError
from runtime.llm import LLM


def log_probabilities(llm: LLM, token_ids: Sequence[int], cut: Sequence[Window]) -> Iterator[list[float]]:
    """For each window the log probabilities of its scored tokens, by the engine, many windows per batch."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for first in range(0, len(cut), 512):
        part = cut[first : first + 512]
        outputs = llm.generate([token_ids[each.start : each.end] for each in part], params, use_tqdm=False)
        for each, output in zip(part, outputs, strict=True):
            assert output.prompt_logprobs is not None, output.outputs[0].error
            entries = output.prompt_logprobs[each.first_scored - each.start :]
            ids = token_ids[each.first_scored : each.end]
            yield [entry[token_id].logprob for entry, token_id in zip(entries, ids, strict=True) if entry is not None]


def measure(llm: LLM, text: str, window: int | None, stride: int | None, max_tokens: int | None) -> dict[str, Any]:
    """The report over a text. Raises ``InvalidArgumentError`` for windows that do not fit it."""
    token_ids = llm.get_tokenizer().encode(text)[:max_tokens]
    window, stride = window_and_stride(window, stride, llm.client.info.max_model_len - 1)  # one more token is sampled
    try:
        cut = windows(len(token_ids), window, stride)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    return summary(log_probabilities(llm, token_ids, cut), token_ids, window, stride)
