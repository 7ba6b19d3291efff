"""Decoders: token strings back to text, as a chain of stages that work on a stream.

A stream is a list of events: a string is a fragment of the current token, None is the token's end. A stage
may fuse tokens into one, which then ends only with the stream. Whole and incremental decoding run the same
stages, so any way of cutting a stream gives the same text.

Supported: ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace, BPEDecoder, WordPiece, Sequence; without a decoder
tokens are joined by spaces, as in the `tokenizers` library.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

from tokenizer.byte_level import from_byte_level
from tokenizer.components.normalizers import read_pattern, replace_spans
from tokenizer.components.pre_tokenizers import read_prepend_scheme
from tokenizer.json_fields import Fields
from tokenizer.patterns.compiled import Pattern

Events = list[str | None]
"""Fragments of tokens; None ends a token."""

_TYPES = ("ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace", "BPEDecoder", "WordPiece", "Sequence")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Stage:
    """One step of a decoder, with the state of one stream."""

    def feed(self, events: Events) -> Events:
        """Takes events, and returns those that are certain."""
        raise NotImplementedError

    def finish(self) -> Events:
        """The stream has ended: returns the rest."""
        return []

    def end_prompt(self) -> Events:
        """Ends the prompt: keeps its effect on later text. Returns held text that later stages have to see."""
        return []


StageFactory = Callable[[], Stage]


class DecoderChain:
    """The factories of the stages of a "decoder" object."""

    def __init__(self, factories: list[StageFactory], is_byte_level: bool, is_streaming: bool) -> None:
        self.factories = factories
        self.is_byte_level = is_byte_level
        """Whether the chain is ByteLevel alone, which has a faster way: bytes joined, then decoded."""
        self.is_streaming = is_streaming
        """Whether text comes out as tokens go in. A chain that works on the fused text gives all at the
        end."""

    def start(self) -> list[Stage]:
        """New stages, for a new stream."""
        return [factory() for factory in self.factories]

    def token_bytes(self, token: str) -> bytes:
        """The bytes that one token stands for in the middle of a text."""
        if self.is_byte_level:
            return from_byte_level(token)
        byte = _BYTE_TOKEN.fullmatch(token)
        stages = self.start()
        if byte and any(isinstance(stage, ByteFallbackStage) for stage in stages):
            return bytes([int(byte[1], 16)])
        if any(isinstance(stage, ByteLevelStage) for stage in stages):
            return from_byte_level(token)
        events: Events = [token, None]
        for stage in stages:
            if isinstance(stage, (ReplaceStage, MetaspaceStage)):
                stage.end_prompt()
                events = stage.feed(events)
        return "".join(event for event in events if event is not None).encode("utf-8", "replace")


def build_decoder(fields: Fields | None) -> DecoderChain:
    """The chain of a "decoder" object. Raises `TokenizerFileError` for a type that is not
    supported."""
    if fields is None:
        return DecoderChain([JoinStage], is_byte_level=False, is_streaming=True)
    kinds: list[tuple[str, Fields]] = _flatten(fields)
    factories = []
    is_fused = False
    is_streaming = True
    for kind, part in kinds:
        factory, needs_whole_token = _stage_factory(kind, part)
        factories.append(factory)
        is_streaming = is_streaming and not (is_fused and needs_whole_token)
        is_fused = is_fused or kind in ("ByteLevel", "Fuse")
    return DecoderChain(factories, [kind for kind, _ in kinds] == ["ByteLevel"], is_streaming)


def _flatten(fields: Fields) -> list[tuple[str, Fields]]:
    kind = fields.one_of("decoder", _TYPES)
    if kind != "Sequence":
        return [(kind, fields)]
    fields.known(["type", "decoders"])
    return [part for decoder in fields.objects("decoders") for part in _flatten(decoder)]


def _stage_factory(kind: str, fields: Fields) -> tuple[StageFactory, bool]:
    """The factory, and whether the stage can only work on whole tokens."""
    if kind == "ByteLevel":
        fields.known(["type", "add_prefix_space", "trim_offsets", "use_regex"])
        return ByteLevelStage, True
    if kind == "Replace":
        fields.known(["type", "pattern", "content"])
        pattern, content = read_pattern(fields), fields.string("content")
        return lambda: ReplaceStage(pattern, content), True
    if kind == "Strip":
        fields.known(["type", "content", "start", "stop"])
        stripped, start, stop = fields.character("content"), fields.count("start"), fields.count("stop")
        return lambda: StripStage(stripped, start, stop), False
    if kind == "Metaspace":
        fields.known(["type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"])
        replacement, scheme = fields.character("replacement"), read_prepend_scheme(fields)
        return lambda: MetaspaceStage(replacement, scheme != "never"), False
    if kind == "BPEDecoder":
        fields.known(["type", "suffix"])
        suffix = fields.string("suffix")
        return lambda: BpeDecoderStage(suffix), True
    if kind == "WordPiece":
        fields.known(["type", "prefix", "cleanup"])
        prefix, cleans = fields.string("prefix", "##"), fields.boolean("cleanup", True)
        return lambda: WordPieceStage(prefix, cleans), True
    fields.known(["type"])
    return (ByteFallbackStage, True) if kind == "ByteFallback" else (FuseStage, False)


class _WholeTokens:
    """Collects the fragments of each token."""

    def __init__(self) -> None:
        self._fragments: list[str] = []

    def collect(self, events: Events) -> list[str]:
        """The tokens that are complete now."""
        tokens = []
        for event in events:
            if event is None:
                tokens.append("".join(self._fragments))
                self._fragments.clear()
            else:
                self._fragments.append(event)
        return tokens


class JoinStage(Stage):
    """No decoder: tokens joined by spaces."""

    def __init__(self) -> None:
        self._is_inside = False
        self._has_tokens = False

    def feed(self, events: Events) -> Events:
        out: Events = []
        for event in events:
            if event is None:
                self._is_inside = False
                continue
            if not self._is_inside and self._has_tokens:
                out.append(" ")
            self._is_inside = self._has_tokens = True
            out.append(event)
        return out


class ByteLevelStage(Stage):
    """Characters of the byte-level alphabet to bytes, bytes to text; invalid bytes become U+FFFD. Fuses.

    A character that the prompt began stays pending: the continuation returns it whole.
    """

    def __init__(self) -> None:
        self._tokens = _WholeTokens()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, events: Events) -> Events:
        text = self._utf8.decode(b"".join(map(from_byte_level, self._tokens.collect(events))))
        return [text] if text else []

    def finish(self) -> Events:
        return [self._utf8.decode(b"", True), None]


class ByteFallbackStage(Stage):
    """`<0xE2>` tokens to text: a run of them that is not valid UTF-8 gives one U+FFFD for each byte.

    Only the run's end shows whether it is valid, so nothing of a run comes out before it.
    """

    def __init__(self) -> None:
        self._tokens = _WholeTokens()
        self._run = bytearray()

    def feed(self, events: Events) -> Events:
        out: Events = []
        for token in self._tokens.collect(events):
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte:
                self._run.append(int(byte[1], 16))
                continue
            if self._run:
                out += self._end_run()
            out += (token, None)
        return out

    def finish(self) -> Events:
        return self._end_run() if self._run else []

    def _end_run(self) -> Events:
        run = bytes(self._run)
        self._run.clear()
        try:
            return [run.decode("utf-8"), None]
        except UnicodeDecodeError:
            return ["\ufffd", None] * len(run)

    def end_prompt(self) -> Events:
        """The prompt ends its run; only a character that it began goes on."""
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            text = decoder.decode(bytes(self._run))
        except UnicodeDecodeError:
            return self._end_run()
        self._run = bytearray(decoder.getstate()[0])
        return [text, None] if text else []


class FuseStage(Stage):
    """All tokens become one."""

    def feed(self, events: Events) -> Events:
        return [event for event in events if event is not None]

    def finish(self) -> Events:
        return [None]


class ReplaceStage(Stage):
    """Replaces a pattern inside each token."""

    def __init__(self, pattern: Pattern, content: str) -> None:
        self._tokens = _WholeTokens()
        self._pattern = pattern
        self._content = content

    def feed(self, events: Events) -> Events:
        out: Events = []
        for token in self._tokens.collect(events):
            out += (replace_spans(self._pattern, self._content, token), None)
        return out


class StripStage(Stage):
    """Strips up to `start` characters from each token's beginning and up to `stop` from its end, if they are
    `content`."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._to_strip = start  # still to be taken off the current token's beginning
        self._held = ""  # the current token's last characters, dropped if the token ends here

    def feed(self, events: Events) -> Events:
        out: Events = []
        for event in events:
            if event is None:
                out.append(None)
                self._to_strip, self._held = self._start, ""
            elif event:
                out.append(self._strip(event))
        return out

    def _strip(self, fragment: str) -> str:
        if self._to_strip:
            kept = fragment
            while self._to_strip and kept.startswith(self._content):
                kept = kept[1:]
                self._to_strip -= 1
            if kept:
                self._to_strip = 0
            fragment = kept
        if not self._stop:
            return fragment
        fragment = self._held + fragment
        trailing = len(fragment) - len(fragment.rstrip(self._content))
        held = min(trailing, self._stop)
        self._held = fragment[len(fragment) - held :]
        return fragment[: len(fragment) - held]


class MetaspaceStage(Stage):
    """The replacement character becomes a space; in the first token it goes, if the encoder put one there."""

    def __init__(self, replacement: str, is_prefixed: bool) -> None:
        self._replacement = replacement
        self._is_prefixed = is_prefixed
        self._is_first = True

    def feed(self, events: Events) -> Events:
        out: Events = []
        for event in events:
            if event is None:
                self._is_first = False
                out.append(None)
            else:
                space = "" if self._is_first and self._is_prefixed else " "
                out.append(event.replace(self._replacement, space))
        return out


_CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class WordPieceStage(Stage):
    """A space stands before each token that begins a word; with `cleans`, no space before punctuation."""

    def __init__(self, prefix: str, cleans: bool) -> None:
        self._tokens = _WholeTokens()
        self._prefix, self._cleans, self._is_first = prefix, cleans, True

    def feed(self, events: Events) -> Events:
        out: Events = []
        for token in self._tokens.collect(events):
            if not self._is_first:
                token = token[len(self._prefix) :] if token.startswith(self._prefix) else f" {token}"
            self._is_first = False
            for written, meant in _CLEANED if self._cleans else ():
                token = token.replace(written, meant)
            out += (token, None)
        return out


class BpeDecoderStage(Stage):
    """The end-of-word suffix becomes a space, but nothing in the last token."""

    def __init__(self, suffix: str) -> None:
        self._tokens = _WholeTokens()
        self._suffix = suffix
        self._held: str | None = None  # the last token so far

    def feed(self, events: Events) -> Events:
        out: Events = []
        for token in self._tokens.collect(events):
            if self._held is not None:
                out += (self._held.replace(self._suffix, " "), None)
            self._held = token
        return out

    def finish(self) -> Events:
        return [] if self._held is None else [self._held.replace(self._suffix, ""), None]

    def end_prompt(self) -> Events:
        if self._held is not None:
            self._held = self._suffix if self._held.endswith(self._suffix) else ""
        return []
