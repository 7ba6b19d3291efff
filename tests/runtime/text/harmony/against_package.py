"""xserv's harmony rendering and parsing beside the package `openai-harmony`, on generated conversations and answers.

Conversations must render to the same token ids and read back as the same messages. Answers are faulty: truncated,
reordered, with tokens lost, doubled and invented. None may raise an error, an answer must parse the same in pieces and
whole, and if the package parses an answer, in its lenient mode, both must agree. Three behaviours of the package for
broken headers are excluded: it drops a header without "<|message|>" unless it is the first, it collapses white space in
the one that it keeps, and it waits for the end of a header of any length.

The package downloads its vocabulary; here that is made from gpt-oss's `tokenizer.json`.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runtime.text.harmony.conversation import harmony_messages
from runtime.text.harmony.message import SPECIAL_TOKENS, HarmonyMessage, Renderer, SpecialIds, special_ids
from runtime.text.harmony.reader import MAX_HEADER, MessageParser
from tokenizer import Tokenizer

VOCABULARY = "o200k_base.tiktoken"
NUM_RANKS = 199_998
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
DATE = "2026-11-23"

WORDS = (
    "the", "Weather", " in", "Zürich", "東京", "😀", "e\u0301", "\n", "\n\n", "  ", "\t", "42", "3.14", "{}", '"', "\\",
    "<", "<|", "|>", "to=", "assistant", "analysis", "final", "json", "functions.f", "//", "don't", "I'LL", "\r\n",
    "\u00a0", "\u2028", "\x1f", "<|end|>", "<|channel|>final", "<|start|>user", "العربية", "क्षि", "ﬁ", "}};", "a" * 40,
)  # fmt: skip


def write_vocabulary(tokenizer: Tokenizer, folder: Path) -> Path:
    """The package's vocabulary file. Raises `ValueError` if the tokenizer is not gpt-oss's."""
    lines = (b"%s %d\n" % (base64.b64encode(tokenizer.token_bytes(rank)), rank) for rank in range(NUM_RANKS))
    content = b"".join(lines)
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ValueError(f"the tokenizer's first {NUM_RANKS} tokens are not o200k_base's: sha256 {found}")
    file = folder / VOCABULARY
    file.write_bytes(content)
    return file


@dataclass
class Difference:
    what: str
    ours: Any
    theirs: Any
    source: Any


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)


class Comparison:
    """The two implementations. Raises `FileNotFoundError` without the tokenizer, `ImportError` without the package."""

    def __init__(self, model: Path) -> None:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        self.tokenizer = Tokenizer.from_file(model / "tokenizer.json")
        ids = special_ids(self.tokenizer)
        assert ids is not None
        self.ids: SpecialIds = ids
        self.renderer = Renderer(self.tokenizer, ids)
        with tempfile.TemporaryDirectory() as folder:
            write_vocabulary(self.tokenizer, Path(folder))
            os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
            self.package = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
            del os.environ["TIKTOKEN_ENCODINGS_BASE"]

    # Conversations

    def conversations(self, num: int, seed: int) -> Report:
        report = Report()
        for i in range(num):
            rng = random.Random(f"{seed} conversation {i}")
            self._compare_chat(rng, report)
            self._compare_messages(rng, report)
        return report

    def _compare_chat(self, rng: random.Random, report: Report) -> None:
        """Compares OpenAI's messages on our side with the package's own objects."""
        from openai_harmony import Conversation, RenderConversationConfig, Role

        chat, tools, effort = any_chat(rng)
        ours = harmony_messages(chat, tools, current_date=DATE, reasoning_effort=effort)
        rendered = self.renderer.conversation(ours, "assistant")
        finals = [i for i, each in enumerate(chat) if each["role"] == "assistant" and "tool_calls" not in each]
        assistants = [i for i, each in enumerate(chat) if each["role"] == "assistant"]
        # The package drops analysis before the first final answer, and only if no message of the assistant follows the
        # last one. Such cases are not compared.
        drops = len(finals) == 1 and assistants[-1] == finals[0]
        their_chat = (
            chat
            if drops
            else [
                {name: value for name, value in each.items() if name != "reasoning_content"}
                if finals and i <= finals[-1]
                else each
                for i, each in enumerate(chat)
            ]
        )
        conversation = Conversation.from_messages(package_messages(their_chat, tools, effort))
        config = RenderConversationConfig(auto_drop_analysis=drops)
        expected = self.package.render_conversation_for_completion(conversation, Role.ASSISTANT, config)
        report.counts["chats"] += 1
        report.counts["chats whose analysis the package dropped"] += drops
        report.counts["tokens"] += len(expected)
        if rendered != expected:
            our_text, their_text = (self.tokenizer.decode(each) for each in (rendered, expected))
            report.differences.append(Difference("rendered chat", our_text, their_text, (chat, tools)))
            return
        self._compare_reading(rendered[: -(1 + len(self.tokenizer.encode_ordinary("assistant")))], None, report)

    def _compare_messages(self, rng: random.Random, report: Report) -> None:
        """Compares messages with names, recipients and channels that a chat does not have."""
        from openai_harmony import Conversation, RenderConversationConfig

        messages = [any_message(rng) for _ in range(rng.randint(1, 6))]
        rendered = self.renderer.conversation(messages)
        theirs = Conversation.from_messages([package_message(message) for message in messages])
        expected = self.package.render_conversation(theirs, RenderConversationConfig(auto_drop_analysis=False))
        report.counts["conversations of any messages"] += 1
        if rendered != expected:
            our_text, their_text = (self.tokenizer.decode(each) for each in (rendered, expected))
            report.differences.append(Difference("rendered messages", our_text, their_text, messages))
            return
        self._compare_reading(rendered, None, report)

    def _compare_reading(self, ids: Sequence[int], role: str | None, report: Report) -> None:
        ours = self.parse(ids, role)
        theirs = self.parse_with_package(ids, role, strict=True)
        if theirs is None:
            report.counts["conversations that the package renders and does not read"] += 1
        elif ours != theirs:
            report.differences.append(Difference("read conversation", ours, theirs, self.tokenizer.decode(ids)))

    # Answers

    def answers(self, num: int, seed: int) -> Report:
        report = Report()
        for i in range(num):
            rng = random.Random(f"{seed} answer {i}")
            role = rng.choice(("assistant", "assistant", "assistant", None))
            self._compare_answer(self.any_answer(rng, role), role, report)
        return report

    def _compare_answer(self, ids: list[int], role: str | None, report: Report) -> None:
        report.counts["answers"] += 1
        try:
            parser = MessageParser(self.tokenizer, self.ids, role)
            parser.push(ids)
            ours = parser.finish()
            cut = MessageParser(self.tokenizer, self.ids, role)
            for token_id in ids:
                cut.push((token_id,))
            in_pieces = cut.finish()
        except Exception as error:
            report.differences.append(Difference("error", repr(error), None, self.tokenizer.decode(ids)))
            return
        report.counts["malformed"] += parser.num_malformed > 0
        text = self.tokenizer.decode(ids)
        if in_pieces != ours:
            report.differences.append(Difference("in pieces", in_pieces, ours, text))
        theirs = self.parse_with_package(ids, role, strict=False)
        if theirs is None:
            return
        report.counts["read by the package"] += 1
        if theirs == ours:
            report.counts["agree"] += 1
            return
        if (reason := excused(ours, theirs, self.headers(ids, role), keeps_first=role is not None)) is not None:
            report.counts[f"agree but for {reason}"] += 1
        else:
            report.differences.append(Difference("answer", ours, theirs, text))

    def parse(self, ids: Sequence[int], role: str | None) -> list[HarmonyMessage]:
        parser = MessageParser(self.tokenizer, self.ids, role)
        parser.push(ids)
        return parser.finish()

    def parse_with_package(self, ids: Sequence[int], role: str | None, *, strict: bool) -> list[HarmonyMessage] | None:
        """The package's messages, or None if it refuses the ids."""
        from openai_harmony import HarmonyError, Role

        try:
            found = self.package.parse_messages_from_completion_tokens(
                ids, None if role is None else Role(role), strict=strict
            )
        except HarmonyError:
            return None
        return [
            HarmonyMessage(
                each.author.role.value,
                "".join(part.text for part in each.content),
                each.author.name,
                each.channel,
                each.recipient,
                each.content_type,
            )
            for each in found
        ]

    def headers(self, ids: Sequence[int], role: str | None) -> list[Header]:
        """The headers of an answer that the package reads."""
        found: list[Header] = []
        begin, is_between = (None, True) if role is None else (0, False)
        for at, token_id in enumerate(ids):
            if begin is not None and token_id in (self.ids.message, self.ids.end, self.ids.return_, self.ids.call):
                length = len(self.tokenizer.decode(ids[begin:at]))
                found.append(Header(length, token_id == self.ids.message))
                begin = None
                is_between = token_id != self.ids.message
            elif begin is None and is_between and token_id == self.ids.start:
                begin = at + 1
            elif begin is None and token_id in (self.ids.end, self.ids.return_, self.ids.call):
                is_between = True
        return found

    def any_answer(self, rng: random.Random, role: str | None) -> list[int]:
        """A model's answer, changed up to five times, and perhaps cut."""
        pieces = any_turn(rng, has_start=role is None)
        for _ in range(rng.randint(0, 3)):
            pieces += any_turn(rng, has_start=rng.random() < 0.97)
        for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3, 5))):
            place = rng.randrange(len(pieces) + 1)
            change = rng.randrange(6)
            if change == 0:
                pieces.insert(place, rng.choice(SPECIAL_TOKENS))
            elif change == 1:
                pieces.insert(place, any_text(rng, 3))
            elif change == 2 and place < len(pieces):
                del pieces[place]
            elif change == 3 and place < len(pieces):
                pieces.insert(place, pieces[place])
            elif change == 4 and len(pieces) > 1:
                other = rng.randrange(len(pieces))
                place = min(place, len(pieces) - 1)
                pieces[place], pieces[other] = pieces[other], pieces[place]
            elif change == 5 and place < len(pieces) and pieces[place] not in SPECIAL_TOKENS:
                pieces[place] = pieces[place][: rng.randrange(len(pieces[place]) + 1)]
        ids: list[int] = []
        tokens = dict(zip(SPECIAL_TOKENS, self.ids, strict=True))
        for piece in pieces:
            ids += [tokens[piece]] if piece in tokens else self.tokenizer.encode_ordinary(piece)
        if rng.random() < 0.1:  # half a character, anywhere
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(256))
        if rng.random() < 0.02:
            rng.shuffle(ids)
        return ids[: rng.randrange(len(ids) + 1)] if rng.random() < 0.25 else ids


def excused(
    ours: list[HarmonyMessage], theirs: list[HarmonyMessage], headers: list[Header], *, keeps_first: bool
) -> str | None:
    """The excluded behaviour that explains the difference, or None. `headers`: the answer's; keeps_first: the package
    keeps the first, though no "<|message|>" follows."""
    if any(header.length > MAX_HEADER for header in headers):
        return "a header that is too long"
    if keeps_first and not headers[0].has_message:
        ours, theirs = ([_with_single_spaces(each) for each in side[:1]] + side[1:] for side in (ours, theirs))
        if ours == theirs:
            return "white space"
    rest = iter(ours)
    num_lost = sum(not header.has_message for header in headers)
    if 0 < len(ours) - len(theirs) <= num_lost and all(message in rest for message in theirs):
        return "a header that the package drops"
    return None


class Header(NamedTuple):
    """length: in characters. has_message: "<|message|>" follows, and not a token that stops a message"""

    length: int
    has_message: bool


def _with_single_spaces(message: HarmonyMessage) -> HarmonyMessage:
    content = " ".join(message.content.replace("<|constrain|>", " <|constrain|>").split())
    return dataclasses.replace(message, content=content)


# The compared objects


def any_text(rng: random.Random, most: int = 12) -> str:
    return rng.choice(("", " ")).join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def any_name(rng: random.Random) -> str:
    return rng.choice(("get_weather", "f", "search-web", "Run_Python3", "a.b", "lookup"))


def any_chat(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str | None]:
    """Messages, tools and reasoning effort in OpenAI's form."""
    tools = [any_tool(rng) for _ in range(rng.randint(1, 4))] if rng.random() < 0.6 else None
    chat: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        chat.append({"role": rng.choice(("system", "developer")), "content": any_text(rng) or "x"})
    num_calls = 0
    for _ in range(rng.randint(1, 4)):
        chat.append({"role": "user", "content": any_text(rng)})
        for _ in range(rng.choice((0, 0, 1, 2)) if tools else 0):
            num_calls += 1
            call_id, name = f"call_{num_calls}", any_name(rng)
            arguments = json.dumps({any_text(rng, 1): any_text(rng, 3)}, ensure_ascii=False)
            function = {"name": name, "arguments": arguments}
            call = {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
            chat.append(_with_reasoning(call | ({"content": "Let me see."} if rng.random() < 0.3 else {}), rng))
            chat.append({"role": "tool", "tool_call_id": call_id, "content": any_text(rng)})
        if rng.random() < 0.7:
            chat.append(_with_reasoning({"role": "assistant", "content": any_text(rng) or "x"}, rng))
    return chat, tools, rng.choice((None, "low", "medium", "high"))


def _with_reasoning(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return message | ({"reasoning_content": any_text(rng) or "x"} if rng.random() < 0.6 else {})


def any_tool(rng: random.Random) -> dict[str, Any]:
    function: dict[str, Any] = {"name": any_name(rng)}
    if rng.random() < 0.8:
        function["description"] = any_text(rng)
    if rng.random() < 0.8:
        function["parameters"] = any_object_schema(rng, 3)
    return {"type": "function", "function": function}


def any_object_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = [rng.choice(("location", "unit", "größe", "n", "items", "a-b")) for _ in range(rng.randint(0, 4))]
    schema: dict[str, Any] = {"type": "object", "properties": {key: any_schema(rng, depth - 1) for key in keys}}
    if rng.random() < 0.7:
        schema["required"] = [key for key in keys if rng.random() < 0.5]
    return schema


def any_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[Any] = ["string", "string", "number", "integer", "boolean", "null", None, ["string", "null"]]
    kinds += ["array", "object", "oneOf", "anyOf", ["integer", "string"]] if depth > 0 else []
    kind = rng.choice(kinds)
    schema: dict[str, Any] = {} if kind in (None, "oneOf", "anyOf") else {"type": kind}
    if kind == "array" and rng.random() < 0.8:
        schema["items"] = any_schema(rng, depth - 1)
    if kind == "object":
        schema = any_object_schema(rng, depth)
    if kind in ("oneOf", "anyOf"):
        schema[kind] = [any_schema(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == "string" and rng.random() < 0.4:
        schema["enum"] = [rng.choice(("celsius", "fahrenheit", "°C")) for _ in range(rng.randint(0, 3))]
    for name, chance, make in (
        ("description", 0.4, lambda: any_text(rng, 4)),
        ("title", 0.15, lambda: any_text(rng, 2)),
        ("examples", 0.15, lambda: [any_text(rng, 2), 5]),
        ("nullable", 0.2, lambda: rng.random() < 0.7),
        ("default", 0.3, lambda: any_default(rng)),
    ):
        if rng.random() < chance:
            schema[name] = make()
    return schema


def any_default(rng: random.Random) -> Any:
    return rng.choice(
        ("celsius", any_text(rng, 2), 10, -1, 0.5, 1e16, 123456789012345680.0, 1.5e-5, 2e-7, 1e300, True, None,
         [1, "a"], {"b": [0.1, {}], "a": "é\n"})
    )  # fmt: skip


def any_message(rng: random.Random) -> HarmonyMessage:
    role = rng.choice(("user", "assistant", "assistant", "tool", "developer", "system"))
    name = f"functions.{any_name(rng)}" if role == "tool" else rng.choice((None, None, None, "ada"))
    channel = rng.choice((None, "analysis", "commentary", "final", "final"))
    recipient = rng.choice((None, None, "all", "assistant", f"functions.{any_name(rng)}", "browser.search"))
    content_type = rng.choice((None, None, None, "<|constrain|>json", "json", "code", "<|constrain|>"))
    return HarmonyMessage(role, any_text(rng), name, channel, recipient, content_type)


def any_turn(rng: random.Random, *, has_start: bool) -> list[str]:
    """One message of a model, in pieces."""
    recipient = rng.choice(("", "", "", f" to=functions.{any_name(rng)}", " to=browser.search", " to=python"))
    channel = rng.choice(("analysis", "commentary", "final", "final", "comment"))
    kind = rng.choice(([], [], ["<|constrain|>", "json"], [" "], [" ", "<|constrain|>", "json"], [" code"], [" json"]))
    in_role, in_channel = (recipient, "") if rng.random() < 0.5 else ("", recipient)
    start = ["<|start|>", rng.choice(("assistant", "assistant", "assistant", "user", "functions.f"))]
    head = [*(start if has_start else []), in_role, "<|channel|>", channel, in_channel, *kind, "<|message|>"]
    return [*(piece for piece in head if piece), any_text(rng), rng.choice(("<|end|>", "<|return|>", "<|call|>"))]


def package_messages(chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, effort: str | None) -> list[Any]:
    """A chat in the form of the package's documentation."""
    from openai_harmony import Author, DeveloperContent, Message, ReasoningEffort, Role, SystemContent, ToolDescription

    system = SystemContent.new().with_conversation_start_date(DATE)
    if effort is not None:
        system = system.with_reasoning_effort(ReasoningEffort[effort.upper()])
    built = [Message.from_role_and_content(Role.SYSTEM, system)]
    developer = DeveloperContent.new()
    has_instructions = chat[0]["role"] in ("system", "developer")
    if has_instructions:
        developer = developer.with_instructions(chat[0]["content"])
    if tools:
        developer = developer.with_function_tools(
            [
                ToolDescription.new(each["name"], each.get("description", ""), parameters=each.get("parameters"))
                for each in (tool["function"] for tool in tools)
            ]
        )
    if has_instructions or tools:
        built.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    names: dict[str, str] = {}
    for message in chat[has_instructions:]:
        role, content = message["role"], message.get("content")
        if role == "tool":
            author = Author.new(Role.TOOL, f"functions.{names[message['tool_call_id']]}")
            answer = Message.from_author_and_content(author, content)
            built.append(answer.with_recipient("assistant").with_channel("commentary"))
            continue
        if "reasoning_content" in message:
            thought = Message.from_role_and_content(Role.ASSISTANT, message["reasoning_content"])
            built.append(thought.with_channel("analysis"))
        if content is not None:
            text = Message.from_role_and_content(Role(role), content)
            channel = "commentary" if "tool_calls" in message else "final"
            built.append(text.with_channel(channel) if role == "assistant" else text)
        for call in message.get("tool_calls", ()):
            name = names[call["id"]] = call["function"]["name"]
            made = Message.from_role_and_content(Role.ASSISTANT, call["function"]["arguments"])
            made = made.with_channel("commentary").with_recipient(f"functions.{name}")
            built.append(made.with_content_type("<|constrain|>json"))
    return built


def package_message(message: HarmonyMessage) -> Any:
    from openai_harmony import Author, Message, Role

    made = Message.from_author_and_content(Author(role=Role(message.role), name=message.name), message.content)
    made.channel, made.recipient, made.content_type = message.channel, message.recipient, message.content_type
    return made
