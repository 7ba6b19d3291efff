"""Renders messages to token ids. Each piece of a header is encoded separately, as in `openai-harmony`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.text.harmony.message import CONSTRAIN, HarmonyMessage, SpecialIds
from tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


class Renderer:
    """
    ids             the tokenizer's special tokens
    parses_content  a special token's text in a message's content becomes the token; else it stays text
    """

    def __init__(self, tokenizer: Tokenizer, ids: SpecialIds, *, parses_content: bool = False) -> None:
        self._ids = ids
        self._text = tokenizer.encode_ordinary
        self._content: Encode = self._text
        if parses_content:
            self._content = lambda text: tokenizer.encode(text, add_special_tokens=False)

    def conversation(self, messages: Sequence[HarmonyMessage], next_role: str | None = None) -> list[int]:
        """With `next_role`, up to where a message of that role begins."""
        rendered = [token_id for message in messages for token_id in self.message(message)]
        return rendered if next_role is None else [*rendered, self._ids.start, *self._text(next_role)]

    def message(self, message: HarmonyMessage) -> list[int]:
        """With the token that ends it: "call" for the assistant's calls, else "end"."""
        is_call = message.role == "assistant" and message.recipient is not None
        return [*self.open_message(message), self._ids.call if is_call else self._ids.end]

    def open_message(self, message: HarmonyMessage) -> list[int]:
        """Without the token that ends it."""
        ids = self._ids
        rendered = [ids.start]
        if message.role == "tool":
            assert message.name is not None, "a tool's message has the tool's name"
            rendered += self._text(message.name)
        else:
            rendered += self._text(message.role)
            if message.name is not None:
                rendered += self._text(f":{message.name}")
        if message.recipient is not None and message.recipient != "all":
            rendered += self._text(f" to={message.recipient}")
        if message.channel is not None:
            rendered += [ids.channel, *self._text(message.channel)]
        if message.content_type is not None:
            if message.content_type.startswith(CONSTRAIN):
                rendered += [*self._text(" "), ids.constrain, *self._text(message.content_type[len(CONSTRAIN) :])]
            else:
                rendered += self._text(f" {message.content_type}")
        return [*rendered, ids.message, *self._content(message.content)]
