"""Turns one choice's token ids into its answer: detokenizes, separates reasoning and tool calls from content, and finds
stop strings in the content.

Ids, log probabilities and text move together: a token is handed out when its text is whole (half a character waits), is
known to be content, reasoning, a tool call or layout, and can no longer become part of a stop string. The concatenated
deltas do not depend on how outputs are cut. The token that completes a stop string is the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from runtime.engine.errors import RequestError
from runtime.engine.messages import EngineOutput, FinishReason, TokenLogprobs
from runtime.engine.sampling_params import SamplingParams
from runtime.text.harmony.message import special_ids
from runtime.text.harmony.prompt import answer_start
from runtime.text.harmony.reader import HarmonyParser
from runtime.text.parts import ContentParser, Part, PartKind, PartParser, ToolCallDelta
from runtime.text.reasoning import THINK, ReasoningParser, ReasoningStart, ReasoningTags
from runtime.text.response_template.parser import AnswerTemplate
from runtime.text.stop import ContentStops
from runtime.text.tools.table import ToolCallParser, ToolReading
from tokenizer import IncrementalDecoder, Tokenizer

_PROMPT_TAIL = 32
"""Prompt tokens that the decoder sees, so that a character or a space at the seam is decoded correctly."""


class TextDelta(msgspec.Struct):
    """The result of one push.

    text              content
    reasoning, tool_calls  if the pipeline parses them; else they are content
    token_ids         of all of these, of the layout between them, and of the end of the choice
    logprobs          one entry a token if the request asked for them, else None
    token_ends        end of each of these tokens in the choice's text; None if there is more than content
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
    """end: of the token's text, in characters from the beginning of the answer's"""

    token_id: int
    logprobs: TokenLogprobs | None
    end: int


class TextPipeline:
    """Turns one choice's ids into text; ``push`` takes its outputs in order.

    reasoning       the state of reasoning at the prompt's end, or None if it is not parsed
    tools           reads the answer's tool calls, or None if they are not parsed
    tags            those around reasoning
    harmony         the answer is harmony's messages, which include reasoning and calls
    template        the model's own declaration of its answers, which include reasoning and calls

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
        tags: ReasoningTags = THINK,
        tools: ToolReading | None = None,
        harmony: bool = False,
        template: AnswerTemplate | None = None,
    ) -> None:
        if tokenizer is None and params.stop_strings:
            raise RequestError("stop strings need a tokenizer, and this model has none", param="stop")
        self.is_finished = False
        self._params = params
        self._stops: ContentStops | None = None
        if params.stop_strings:
            self._stops = ContentStops(params.stop_strings, keeps_stop=params.include_stop_str_in_output)
        self._decoder = None
        self._sorter: _Sorter | None = None
        self._harmony: HarmonyParser | None = None
        self._markers: dict[int, str] = {}  # special tokens that mark tool calls, or messages
        if tokenizer is not None and params.detokenize:
            shown: list[str] = []
            parser: PartParser | None = None
            if harmony and (harmony_ids := special_ids(tokenizer)) is not None:
                start = answer_start(tokenizer, harmony_ids, prompt_token_ids)
                parser = self._harmony = HarmonyParser(start, tools)
                self._markers = harmony_ids.by_id
                shown += self._markers.values()
            elif template is not None:
                parser = template.parser(tokenizer, prompt_token_ids, tools)
                shown += template.shown
            elif tools is not None:
                ids = {marker: tokenizer.token_to_id(marker) for marker in tools.notation.markers}
                special = {ids[marker]: marker for marker in ids if ids[marker] in tokenizer.all_special_ids}
                parser = ToolCallParser(tools, frozenset(special.values()))
                self._markers = {token_id: marker for token_id, marker in special.items() if token_id is not None}
                shown += special.values()
            if reasoning is not None and template is None:
                parser = ReasoningParser(reasoning, parser, tags)
                shown += tags.tokens
            tag_ids = [tag_id for tag in shown if (tag_id := tokenizer.token_to_id(tag)) is not None]
            self._decoder = IncrementalDecoder(
                tokenizer, params.skip_special_tokens, prompt_token_ids[-_PROMPT_TAIL:], tag_ids
            )
            self._sorter = _Sorter(
                parser or ContentParser(),
                self._stops,
                has_logprobs=params.logprobs is not None,
                has_ends=parser is None,
            )
        self._num_tokens = 0
        self._text_end = 0
        self._stop_floor = 0  # end of the text of the first `min_tokens` tokens

    @property
    def num_malformed_headers(self) -> int:
        """`HarmonyReader.num_malformed` of the answer."""
        return 0 if self._harmony is None else self._harmony.num_malformed

    def push(self, output: EngineOutput) -> TextDelta:
        """The delta of this output; empty after the choice has finished."""
        if self.is_finished:
            return TextDelta()
        reason = output.finish_reason
        if self._sorter is None:
            delta = self._ids_alone(output)
        else:
            start = self._text_end
            tokens, text, places = self._read(output)
            places = [place - start for place in places]
            delta = self._sorter.push(tokens, text, places, floor=self._stop_floor, is_last=reason is not None)
        if self._stops is not None and (match := self._stops.match) is not None:
            delta.finish_reason, delta.stop_reason, delta.should_cancel = "stop", match.stop, reason is None
        elif reason is not None:
            delta.finish_reason, delta.stop_reason = reason, output.stop_reason
            if reason == "stop" and output.new_token_ids and not self._params.include_stop_str_in_output:
                _leave_out_stop_id(delta)
        self.is_finished = delta.finish_reason is not None
        return delta

    def _read(self, output: EngineOutput) -> tuple[list[_Token], str, list[int]]:
        """The output's tokens, their text, and the indices in the answer's text of the markers among them."""
        assert self._decoder is not None
        ids, reason = output.new_token_ids, output.finish_reason
        num_with_text = len(ids)
        if reason == "stop" and not self._params.include_stop_str_in_output:
            num_with_text -= 1  # a complete grammar ends the choice without an id
        tokens, texts, places = [], [], []
        for place, token_id in enumerate(ids):
            if place < num_with_text:
                text = self._decoder.push((token_id,))
                texts.append(text)
                self._text_end += len(text)
                marker = self._markers.get(token_id)
                if marker is not None and text.endswith(marker):
                    places.append(self._text_end - len(marker))
            logprobs = None if output.logprobs is None else output.logprobs[place]
            tokens.append(_Token(token_id, logprobs, self._text_end))
            self._num_tokens += 1
            if self._num_tokens <= self._params.min_tokens:
                self._stop_floor = self._text_end
        if reason is not None:
            texts.append(self._decoder.flush())
            self._text_end += len(texts[-1])
            if self._num_tokens <= self._params.min_tokens:
                self._stop_floor = self._text_end
        return tokens, "".join(texts), places

    def _ids_alone(self, output: EngineOutput) -> TextDelta:
        delta = TextDelta(token_ids=list(output.new_token_ids))
        if self._params.logprobs is not None:
            delta.logprobs = delta.content_logprobs = list(output.logprobs or ())
            delta.token_ends = [0] * len(delta.logprobs)
        return delta


def _leave_out_stop_id(delta: TextDelta) -> None:
    """The token that ended the choice has no text, so it does not belong to the content."""
    if delta.logprobs and delta.content_logprobs and delta.content_logprobs[-1] is delta.logprobs[-1]:
        delta.content_logprobs = delta.content_logprobs[:-1]


class _Sorter:
    """Sorts an answer's text, and the tokens that hold it, into content, reasoning and tool calls.

    stops     the answer's end, if it is before its text's
    has_ends  its deltas have the ends of their tokens in the text
    """

    def __init__(self, parser: PartParser, stops: ContentStops | None, *, has_logprobs: bool, has_ends: bool) -> None:
        self._parser = parser
        self._stops = stops
        self._has_logprobs = has_logprobs
        self._has_ends = has_ends
        self._tokens: deque[_Token] = deque()  # whose text is not sorted yet
        self._start = 0  # start of the first of them
        self._kinds: set[PartKind] = set()  # of its text so far
        self._end = 0  # of the text that is sorted
        self._last_kind: PartKind = "content"

    def push(
        self, tokens: Sequence[_Token], text: str, places: Sequence[int] = (), *, floor: int = 0, is_last: bool = False
    ) -> TextDelta:
        """The certain part of `text`, which these tokens hold, and of earlier held text. `places`: indices in it of
        markers that are special tokens. `floor`: `ContentStops.push`'s."""
        parts = self._parser.push(text, places)
        if is_last:
            parts += self._parser.finish()
        self._tokens.extend(tokens)
        if self._stops is not None:
            parts = self._stops.push(parts, floor, self._token_end, is_last=is_last)
            if self._stops.match is not None:
                self._drop_tokens_behind(self._stops.match.end)
                is_last = True
        if not is_last and self._is_one(parts, tokens, text):
            return self._all_of(parts[0], tokens)
        delta = TextDelta()
        if self._has_logprobs:
            delta.logprobs, delta.content_logprobs = [], []
            delta.token_ends = [] if self._has_ends else None
        for part in parts:
            self._show(delta, part)
            self._end += len(part.text)
            self._last_kind = part.kind
            self._hand_out(delta, part.kind)
        if is_last:  # the tokens of a stop string, or without text
            if self._stops is not None and self._stops.match is not None:
                self._last_kind = "content"
            for token in self._tokens:
                self._kinds.add(self._last_kind)
                self._add(delta, token)
        return delta

    def _token_end(self, place: int) -> int:
        end = self._start
        for token in self._tokens:
            if token.end > place:
                break
            end = token.end
        return end

    def _drop_tokens_behind(self, end: int) -> None:
        """Drops the tokens after the first one that reaches ``end``."""
        last = next((i for i, token in enumerate(self._tokens) if token.end >= end), len(self._tokens))
        self._tokens = deque(list(self._tokens)[: last + 1])

    def _is_one(self, parts: list[Part], tokens: Sequence[_Token], text: str) -> bool:
        """Whether nothing was held, and all new text is one part: the usual case."""
        return (
            len(parts) == 1
            and len(parts[0].text) == len(text)
            and len(self._tokens) == len(tokens)
            and not self._has_logprobs
            and tokens[-1].end > (tokens[-2].end if len(tokens) > 1 else self._start)
        )

    def _all_of(self, part: Part, tokens: Sequence[_Token]) -> TextDelta:
        self._tokens.clear()
        delta = TextDelta(token_ids=[token.token_id for token in tokens])
        self._show(delta, part)
        if part.kind == "reasoning":
            delta.num_reasoning_tokens = len(tokens)
        self._start = self._end = self._end + len(part.text)
        self._last_kind = part.kind
        return delta

    def _show(self, delta: TextDelta, part: Part) -> None:
        if part.kind == "content":
            delta.text += part.lead + part.text
        elif part.kind == "reasoning":
            delta.reasoning += part.lead + part.text
        for call in part.calls:
            last = delta.tool_calls[-1] if delta.tool_calls else None
            if last is not None and last.id is None and call.id is None:  # another piece of the same call's arguments
                delta.tool_calls[-1] = ToolCallDelta(call.index, arguments=last.arguments + call.arguments)
            else:
                delta.tool_calls.append(call)

    def _hand_out(self, delta: TextDelta, kind: PartKind) -> None:
        """Hands out the tokens that end within a part of this kind. One without text goes with the next part."""
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
            if delta.token_ends is not None:
                delta.token_ends.append(token.end)
            if "content" in self._kinds:
                delta.content_logprobs.append(token.logprobs)
        if "reasoning" in self._kinds:
            delta.num_reasoning_tokens += 1
        self._kinds.clear()
