"""From one choice's token ids to its text: decode, look for stop strings, hand out.

Ids, log probabilities and text move together: a token is handed out when its text is whole (half a character
waits) and cannot become part of a stop string any more. However the outputs are cut, the deltas put together
are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineOutput, FinishReason, TokenLogprobs
from runtime.engine.sampling_params import SamplingParams
from runtime.text.stop import StopMatch, StopMatcher

if TYPE_CHECKING:
    from tokenizer import Tokenizer

_PROMPT_TAIL = 32
"""Prompt tokens that the decoder sees, so that a character or a space at the seam comes out right."""


@dataclass(slots=True)
class TextDelta:
    """What one push has made certain.

    logprobs       one entry a token when the request asked for them, else None
    stop_reason    with ``finish_reason="stop"``: the stop string or the stop id; None for EOS
    should_cancel  a stop string was found while the engine still works on this choice
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    should_cancel: bool = False


class TextPipeline:
    """One choice's way from ids to text; ``push`` takes its outputs in order.

    Without a tokenizer, or with ``detokenize=False``, ids pass through and the text is empty. Raises
    ``RequestError`` for stop strings without a tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        if tokenizer is None and params.stop_strings:
            raise RequestError("stop strings need a tokenizer, and this model has none", param="stop")
        self.is_finished = False
        self._params = params
        self._decoder = None
        if tokenizer is not None and params.detokenize:
            from tokenizer import IncrementalDecoder

            self._decoder = IncrementalDecoder(
                tokenizer, params.skip_special_tokens, prompt_token_ids[-_PROMPT_TAIL:]
            )
        self._matcher = StopMatcher(params.stop_strings) if params.stop_strings else None
        self._match: StopMatch | None = None
        self._num_tokens = 0
        self._held: deque[tuple[int, TokenLogprobs | None, int]] = deque()  # id, logprobs, end of its text
        self._held_text = ""  # text[_held_start:], not handed out yet
        self._held_start = 0

    def push(self, output: EngineOutput) -> TextDelta:
        """What this output adds. After the choice has finished, nothing."""
        if self.is_finished:
            return TextDelta()
        entries: Sequence[TokenLogprobs | None] = output.logprobs or [None] * len(output.new_token_ids)
        for place, (token_id, logprobs) in enumerate(zip(output.new_token_ids, entries, strict=True), 1):
            self._num_tokens += 1
            is_stop_id = output.finish_reason == "stop" and place == len(output.new_token_ids)
            if self._decoder is not None and not (is_stop_id and not self._params.include_stop_str_in_output):
                self._add_text(self._decoder.push((token_id,)))
            self._held.append((token_id, logprobs, self._held_start + len(self._held_text)))
            if self._match is not None:
                break  # tokens beyond the match do not count
        if output.finish_reason is not None and self._match is None:
            self._end_text()
        if self._match is not None:
            return self._finish("stop", self._match.stop, should_cancel=output.finish_reason is None)
        if output.finish_reason is not None:
            return self._finish(output.finish_reason, output.stop_reason)
        return self._delta(self._num_certain())

    def _add_text(self, text: str) -> None:
        self._held_text += text
        if self._matcher is not None:
            self._match = self._matcher.push(text, can_match=self._num_tokens > self._params.min_tokens)

    def _end_text(self) -> None:
        if self._decoder is not None:
            self._add_text(self._decoder.flush())
        if self._matcher is not None and self._match is None:
            self._match = self._matcher.finish()

    def _num_certain(self) -> int:
        """Tokens at the front whose text is certain. Those without text wait for the next that has some."""
        if self._decoder is None:
            return len(self._held)
        safe_end = self._held_start + len(self._held_text)
        if self._matcher is not None:
            safe_end = min(safe_end, self._matcher.safe_end)
        count, last_end = 0, self._held_start
        for position, (_, _, end) in enumerate(self._held, 1):
            if end > safe_end:
                break
            if end > last_end:
                count, last_end = position, end
        return count

    def _finish(
        self, reason: FinishReason, stop_reason: int | str | None, *, should_cancel: bool = False
    ) -> TextDelta:
        self.is_finished = True
        if self._match is not None:
            keeps_stop = self._params.include_stop_str_in_output
            end = self._match.end if keeps_stop else self._match.start
            self._held_text = self._held_text[: end - self._held_start]
        delta = self._delta(len(self._held), takes_all_text=True)
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        delta.should_cancel = should_cancel
        return delta

    def _delta(self, num_tokens: int, *, takes_all_text: bool = False) -> TextDelta:
        """Hand out the first ``num_tokens`` held tokens and their text."""
        taken = [self._held.popleft() for _ in range(num_tokens)]
        length = len(self._held_text) if takes_all_text else (taken[-1][2] - self._held_start if taken else 0)
        text, self._held_text = self._held_text[:length], self._held_text[length:]
        self._held_start += length
        return TextDelta(
            text=text,
            token_ids=[token_id for token_id, _, _ in taken],
            logprobs=[entry for _, entry, _ in taken if entry is not None]
            if self._params.logprobs is not None
            else None,
        )
