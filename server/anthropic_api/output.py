"""One message's content as it grows: deltas of text, reasoning and tool calls become blocks and their events, in
Anthropic's order: start, deltas, stop, one block after the other.

A block is open until a delta of another kind, or of another call, comes. A whole answer holds the final blocks, so both
agree."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.text.pipeline import TextDelta as Delta
from server.anthropic_api.objects import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    MessageEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from server.requests.tool_input import tool_input

SIGNATURE = "unsigned"


class MessageContent:
    """The blocks so far. The events of `push` and `finish` must be encoded at once: they hold the blocks themselves,
    which still change. `omits_thinking`: blocks of thinking stay empty."""

    def __init__(self, *, omits_thinking: bool = False) -> None:
        self.blocks: list[Block] = []
        self.has_calls = False
        self._omits_thinking = omits_thinking
        self._open: Block | None = None
        self._open_call = -1
        self._arguments: list[str] = []

    def push(self, delta: Delta) -> Iterator[MessageEvent]:
        """Adds a delta; returns its events."""
        if delta.reasoning:
            yield from self._add_thinking("" if self._omits_thinking else delta.reasoning)
        if delta.text:
            yield from self._add_text(delta.text)
        for call in delta.tool_calls:
            if call.index != self._open_call or not isinstance(self._open, ToolUseBlock):
                yield from self._begin(ToolUseBlock(id=call.id or "", name=call.name or ""))
                self._open_call, self._arguments, self.has_calls = call.index, [], True
            if call.arguments:
                self._arguments.append(call.arguments)
                yield BlockDelta(self._index, InputJsonDelta(call.arguments))

    def finish(self) -> Iterator[MessageEvent]:
        """Ends the last block."""
        block, self._open = self._open, None
        if block is None:
            return
        if isinstance(block, ThinkingBlock):
            block.signature = SIGNATURE
            yield BlockDelta(self._index, SignatureDelta(SIGNATURE))
        elif isinstance(block, ToolUseBlock):
            block.input = tool_input("".join(self._arguments))
        yield BlockStop(self._index)

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _add_thinking(self, text: str) -> Iterator[MessageEvent]:
        if not isinstance(self._open, ThinkingBlock):
            yield from self._begin(ThinkingBlock())
        assert isinstance(self._open, ThinkingBlock)
        if text:
            self._open.thinking += text
            yield BlockDelta(self._index, ThinkingDelta(text))

    def _add_text(self, text: str) -> Iterator[MessageEvent]:
        if not isinstance(self._open, TextBlock):
            yield from self._begin(TextBlock())
        assert isinstance(self._open, TextBlock)
        self._open.text += text
        yield BlockDelta(self._index, TextDelta(text))

    def _begin(self, block: Block) -> Iterator[MessageEvent]:
        yield from self.finish()
        self.blocks.append(block)
        self._open = block
        yield BlockStart(self._index, block)
