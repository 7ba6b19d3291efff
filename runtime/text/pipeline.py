"""From one choice's token ids to its answer: decode, look for stop strings, tell reasoning and tool calls from content.

Ids, log probabilities and text move together: a token is handed out when its text is whole (half a character
waits), cannot become part of a stop string any more, and is known to be content, reasoning, a tool call or layout.
However the outputs are cut, the deltas put together are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineOutput, FinishReason, TokenLogprobs
from runtime.engine.sampling_params import SamplingParams
from runtime.text.harmony.answer_parts import HarmonyParser
from runtime.text.harmony.message import special_ids
from runtime.text.harmony.prompt import answer_start
from runtime.text.parts import Part, PartKind, PartParser, ToolCallDelta
from runtime.text.reasoning import TAGS as REASONING_TAGS
from runtime.text.reasoning import ReasoningParser, ReasoningStart
from runtime.text.stop import StopMatch, StopMatcher
from runtime.text.tools.notation import ToolReading
from runtime.text.tools.parser import ToolCallParser

if TYPE_CHECKING:
    from tokenizer import Tokenizer

_PROMPT_TAIL = 32
"""Prompt tokens that the decoder sees, so that a character or a space at the seam comes out right."""


class TextDelta(msgspec.Struct):
    """What one push has made certain.

    text              content
    reasoning, tool_calls  where the pipeline looks for them; else they are content
    token_ids         of all of these, of the layout between them, and of what ended the choice
    logprobs          one entry a token when the request asked for them, else None
    token_ends        where in the choice's text each of these tokens ends; None where there is more than content
    content_logprobs  the same, of the tokens that hold some of the content
    num_reasoning_tokens  how many of the tokens hold some of the reasoning
    stop_reason       with ``finish_reason="stop"``: the stop string or the stop id; None for EOS
    should_cancel     a stop string was found while the engine still works on this choice
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    token_ends: list[int] | None = None
    content_logprobs: list[TokenLogprobs] | None = None
    num_reasoning_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    should_cancel: bool = False


class _Token(NamedTuple):
    """end: where the token's text ends, in characters from the beginning of the answer's"""

    token_id: int
    logprobs: TokenLogprobs | None
    end: int


class TextPipeline:
    """One choice's way from ids to text; ``push`` takes its outputs in order.

    reasoning       the model may think between tags: how the prompt leaves that; None: it is all content
    tools           how the answer's tool calls are read; None: it has none
    harmony         the answer is harmony's messages, which say what is reasoning, a call or content

    Without a tokenizer, or with ``detokenize=False``, ids pass through and the text is empty. Raises
    ``RequestError`` for stop strings without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        reasoning: ReasoningStart | None = None,
        tools: ToolReading | None = None,
        harmony: bool = False,
    ) -> None:
        if tokenizer is None and params.stop_strings:
            raise RequestError("stop strings need a tokenizer, and this model has none", param="stop")
        self.is_finished = False
        self._params = params
        self._decoder = None
        self._sorter = None
        self._harmony: HarmonyParser | None = None
        self._markers: dict[int, str] = {}  # special tokens that mark tool calls, or messages
        if tokenizer is not None and params.detokenize:
            from tokenizer import IncrementalDecoder

            tags: list[str] = []
            parser: PartParser | None = None
            if harmony and (harmony_ids := special_ids(tokenizer)) is not None:
                start = answer_start(tokenizer, harmony_ids, prompt_token_ids)
                parser = self._harmony = HarmonyParser(start, tools)
                self._markers = harmony_ids.by_id
                tags += self._markers.values()
            elif tools is not None:
                ids = {marker: tokenizer.token_to_id(marker) for marker in tools.notation.markers}
                special = {ids[marker]: marker for marker in ids if ids[marker] in tokenizer.all_special_ids}
                parser = ToolCallParser(tools, frozenset(special.values()))
                self._markers = {token_id: marker for token_id, marker in special.items() if token_id is not None}
                tags += special.values()
            if reasoning is not None:
                parser = ReasoningParser(reasoning, parser)
                tags += REASONING_TAGS
            tag_ids = [tag_id for tag in tags if (tag_id := tokenizer.token_to_id(tag)) is not None]
            self._decoder = IncrementalDecoder(
                tokenizer, params.skip_special_tokens, prompt_token_ids[-_PROMPT_TAIL:], tag_ids
            )
            if parser is not None:
                self._sorter = _Sorter(parser, has_logprobs=params.logprobs is not None)
        self._matcher = StopMatcher(params.stop_strings) if params.stop_strings else None
        self._match: StopMatch | None = None
        self._num_tokens = 0
        self._held: list[_Token] = []
        self._held_text = ""  # text[_held_start:], not handed out yet
        self._held_start = 0
        self._places: list[int] = []  # where the markers that are not handed out yet begin

    @property
    def num_malformed_headers(self) -> int:
        """Of harmony's messages: what `HarmonyReader.num_malformed` counts."""
        return 0 if self._harmony is None else self._harmony.num_malformed

    def push(self, output: EngineOutput) -> TextDelta:
        """What this output adds. After the choice has finished, nothing."""
        if self.is_finished:
            return TextDelta()
        ids, reason = output.new_token_ids, output.finish_reason
        num_with_text = len(ids) if self._decoder is not None else 0
        if reason == "stop" and not self._params.include_stop_str_in_output:
            num_with_text -= 1
        for place, token_id in enumerate(ids):
            self._num_tokens += 1
            if place < num_with_text:
                assert self._decoder is not None
                self._add_text(self._decoder.push((token_id,)), self._markers.get(token_id))
            logprobs = None if output.logprobs is None else output.logprobs[place]
            self._held.append(_Token(token_id, logprobs, self._held_start + len(self._held_text)))
            if self._match is not None:
                break  # tokens beyond the match do not count
        if reason is not None and self._match is None:
            self._end_text()
        if self._match is not None:
            return self._finish("stop", self._match.stop, should_cancel=reason is None)
        if reason is not None:
            return self._finish(reason, output.stop_reason, has_stop_id=reason == "stop" and bool(ids))
        return self._delta(self._num_certain())

    def _add_text(self, text: str, marker: str | None = None) -> None:
        """`marker`: the text is a special token's, which ends with this."""
        self._held_text += text
        if marker is not None and text.endswith(marker):
            self._places.append(self._held_start + len(self._held_text) - len(marker))
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
        held, count = self._held, len(self._held)
        if self._matcher is not None:
            safe_end = self._matcher.safe_end
            while count and held[count - 1].end > safe_end:
                count -= 1
        while count and held[count - 1].end == (held[count - 2].end if count > 1 else self._held_start):
            count -= 1
        return count

    def _finish(
        self,
        reason: FinishReason,
        stop_reason: int | str | None,
        *,
        should_cancel: bool = False,
        has_stop_id: bool = False,
    ) -> TextDelta:
        """``has_stop_id``: the last token is the one that ended the choice; a complete grammar ends it without one."""
        self.is_finished = True
        if self._match is not None:
            keeps_stop = self._params.include_stop_str_in_output
            end = self._match.end if keeps_stop else self._match.start
            self._held_text = self._held_text[: end - self._held_start]
        delta = self._delta(len(self._held), is_last=True)
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        delta.should_cancel = should_cancel
        if has_stop_id and not self._params.include_stop_str_in_output and delta.logprobs and delta.content_logprobs:
            is_content = delta.content_logprobs[-1] is delta.logprobs[-1]
            delta.content_logprobs = delta.content_logprobs[:-1] if is_content else delta.content_logprobs
        return delta

    def _delta(self, num_tokens: int, *, is_last: bool = False) -> TextDelta:
        """Hand out the first ``num_tokens`` held tokens and their text, or all there is."""
        if not num_tokens and not is_last:
            return TextDelta()
        taken, self._held = self._held[:num_tokens], self._held[num_tokens:]
        length = len(self._held_text) if is_last else taken[-1].end - self._held_start
        text, self._held_text = self._held_text[:length], self._held_text[length:]
        start, self._held_start = self._held_start, self._held_start + length
        if self._sorter is not None:
            places: list[int] = []
            if self._places:
                places = [place - start for place in self._places if place < self._held_start]
                del self._places[: len(places)]
            return self._sorter.push(taken, text, places, is_last=is_last)
        token_ids = [token.token_id for token in taken]
        if self._params.logprobs is None:
            return TextDelta(text=text, token_ids=token_ids)
        logprobs = [token.logprobs for token in taken if token.logprobs is not None]
        ends = [token.end for token in taken if token.logprobs is not None]
        return TextDelta(
            text=text, token_ids=token_ids, logprobs=logprobs, token_ends=ends, content_logprobs=logprobs
        )


class _Sorter:
    """Deals text and its tokens out to content, reasoning and tool calls."""

    def __init__(self, parser: PartParser, *, has_logprobs: bool) -> None:
        self._parser = parser
        self._has_logprobs = has_logprobs
        self._tokens: deque[_Token] = deque()  # whose text is not sorted yet
        self._start = 0  # where the first of them begins
        self._kinds: set[PartKind] = set()  # of which it has some already
        self._end = 0  # of the text that is sorted
        self._last_kind: PartKind = "content"

    def push(self, tokens: Sequence[_Token], text: str, places: Sequence[int], *, is_last: bool) -> TextDelta:
        """What is certain of `text`, which these tokens hold, and of what was held before. `places`: where markers that
        are special tokens begin in it."""
        parts = self._parser.push(text, places)
        if is_last:
            parts += self._parser.finish()
        if len(parts) == 1 and not (self._tokens or is_last or self._has_logprobs) and len(parts[0].text) == len(text):
            return self._all_of(parts[0], tokens)
        self._tokens.extend(tokens)
        delta = TextDelta()
        if self._has_logprobs:
            delta.logprobs, delta.content_logprobs = [], []
        for part in parts:
            self._show(delta, part)
            self._end += len(part.text)
            self._last_kind = part.kind
            self._hand_out(delta, part.kind)
        if is_last:  # the tokens of a stop string, or without text
            for token in self._tokens:
                self._kinds.add(self._last_kind)
                self._add(delta, token)
        return delta

    def _all_of(self, part: Part, tokens: Sequence[_Token]) -> TextDelta:
        """Nothing was held, and all that has come is one part: so it is with most of a text."""
        delta = TextDelta(token_ids=[token.token_id for token in tokens])
        self._show(delta, part)
        if part.kind == "reasoning":
            delta.num_reasoning_tokens = len(tokens)
        self._start = self._end = self._end + len(part.text)
        self._last_kind = part.kind
        return delta

    def _show(self, delta: TextDelta, part: Part) -> None:
        if part.kind == "content":
            delta.text += part.text
        elif part.kind == "reasoning":
            delta.reasoning += part.text
        for call in part.calls:
            last = delta.tool_calls[-1] if delta.tool_calls else None
            if last is not None and last.id is None and call.id is None:  # another piece of the same call's arguments
                delta.tool_calls[-1] = ToolCallDelta(call.index, arguments=last.arguments + call.arguments)
            else:
                delta.tool_calls.append(call)

    def _hand_out(self, delta: TextDelta, kind: PartKind) -> None:
        """The tokens that end within a part of this kind. One without text goes along with what follows it."""
        while self._tokens:
            token = self._tokens[0]
            if token.end > self._end or token.end == self._end == self._start:
                break
            self._kinds.add(kind)
            self._add(delta, self._tokens.popleft())
            self._start = token.end
        if self._start < self._end:
            self._kinds.add(kind)

    def _add(self, delta: TextDelta, token: _Token) -> None:
        delta.token_ids.append(token.token_id)
        if token.logprobs is not None and delta.logprobs is not None and delta.content_logprobs is not None:
            delta.logprobs.append(token.logprobs)
            if "content" in self._kinds:
                delta.content_logprobs.append(token.logprobs)
        if "reasoning" in self._kinds:
            delta.num_reasoning_tokens += 1
        self._kinds.clear()
