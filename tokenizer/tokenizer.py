"""The tokenizer: text to token ids and back.

A text goes through five steps, each in a file of its own: added tokens are cut out (`added_tokens`), the rest is
normalized (`normalizers`) and cut into words (`pre_tokenizers`), each word is encoded (`bpe`), and special ids are put
around the result (`post_processors`). `decoders` is the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, overload

from tokenizer.bpe.byte_encoder import ByteEncoder
from tokenizer.bpe.model import BpeModel, WordCache
from tokenizer.byte_level import replace_surrogates, to_byte_level
from tokenizer.components.added_tokens import AddedToken, AddedTokenFinder
from tokenizer.components.decoders import build_decoder
from tokenizer.components.normalizers import build_normalizer, leaves_alone
from tokenizer.components.post_processors import PostProcessor, build_post_processor
from tokenizer.components.pre_tokenizers import build_pre_tokenizer, byte_level_step, pre_tokenize, word_pattern
from tokenizer.errors import ChatTemplateError, TokenIdError, TokenizerFileError
from tokenizer.json_fields import Fields, shown
from tokenizer.loading import TokenizerFiles, read_folder
from tokenizer.patterns.automaton import compile_automaton
from tokenizer.patterns.tree import NotTabularError
from tokenizer.templates.chat_template import render_chat
from tokenizer.templates.content_marks import ContentMarks, free_mark, is_no_turn, mapped, without
from tokenizer.templates.template_forms import TemplateForms, forms_of
from tokenizer.unigram.model import UnigramModel
from tokenizer.warn import warn_once
from tokenizer.word_level import WordLevelModel
from tokenizer.word_piece import WordPieceModel

_ID_LIMIT = 1 << 32

SpecialTokensInContent = Literal["parse", "text"]

_PROBE = tuple({"role": role, "content": role} for role in ("system", "user", "assistant", "user"))
"""A conversation that shows what a template writes around messages."""


class Tokenizer:
    """A tokenizer of BPE, Unigram, WordPiece or WordLevel, equal to the `tokenizers` library's id for id.

    Threads may share it.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        """Builds from `loading.read_folder`'s result. Raises `TokenizerFileError` for an unsupported feature."""
        fields = files.tokenizer
        _check_top_level(fields)
        self._model = _build_model(fields.object("model"), files)
        self._normalizer = build_normalizer(fields.optional_object("normalizer"))
        self._steps = build_pre_tokenizer(fields.optional_object("pre_tokenizer"))
        self._post_processor = build_post_processor(fields.optional_object("post_processor"))
        self.decoder = build_decoder(fields.optional_object("decoder"))
        empty = [name for name, template in files.chat_templates.items() if not template.strip()]
        if empty:  # it would write none of a conversation
            warn_once(f"{files.tokenizer.file}: the chat template {empty[0]!r} is empty, and counts as none")
        kept = {name: template for name, template in files.chat_templates.items() if name not in empty}
        self.chat_templates: Mapping[str, str] = kept
        """The chat templates by name; the usual one is "default"."""

        self.response_template = files.response_template
        """tokenizer_config.json's declaration of how answers are parsed, unchecked; None if there is none."""

        self._has_own_ids = files.has_own_ids
        self._id_to_added: dict[int, AddedToken] = {}
        self._added_ids: dict[str, int] = {}
        self._add_tokens(fields, files)
        self._named_tokens = {name: token.content for name, token in files.named_tokens.items()}
        self._marks: dict[str, ContentMarks] = {}
        self._splits_special_tokens = files.splits_special_tokens
        self._special_texts = {token.content for token in self._id_to_added.values() if token.is_special}
        self._set_added_bos_eos(files)
        self._index_tokens()

        self._byte_encoder = self._build_byte_encoder()
        is_mapped_last = bool(self._steps) and self._steps[-1] is byte_level_step
        if is_mapped_last:  # the mapping to bytes happens once for each word, on the way into the cache
            self._steps = self._steps[:-1]
            self._words = WordCache(lambda word: self._model.encode_word(to_byte_level(word)))
        else:
            self._words = WordCache(self._model.encode_word)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Tokenizer:
        """Read a model folder. Raises `TokenizerFileError`, which names file and field."""
        return cls.from_files(read_folder(Path(folder)))

    @classmethod
    def from_file(cls, file: str | Path) -> Tokenizer:
        """Read one `tokenizer.json` alone, without the files around it."""
        return cls.from_files(TokenizerFiles(Fields.read(Path(file))))

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> Tokenizer:
        """Builds from the files of a folder or another source. Raises `TokenizerFileError`."""
        try:
            return cls(files)
        except RecursionError as error:
            raise TokenizerFileError(files.tokenizer.file, "", "is nested too deeply") from error

    # Vocabulary

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, or None."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, or None."""
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills a batch, or None."""
        return self._named_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        """The id of unknown text, or None."""
        return self._named_id("unk_token")

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """ "bos_token", "eos_token", ... with the strings that they name."""
        return dict(self._named_tokens)

    @property
    def all_special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        return self._special_ids

    def id_to_token(self, token_id: int) -> str | None:
        """The token's string as the decoder sees it, or None."""
        return self._tokens.get(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's string, or None."""
        token_id = self._added_ids.get(token)
        return token_id if token_id is not None else self._model.vocab.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds in the middle of a text; none for an id outside the vocabulary. Raises
        `TokenIdError` for an id that no vocabulary can hold."""
        return self._bytes[token_id]

    # Encoding

    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool | None = None) -> list[int]:
        """The ids of `text`.

        With `split_special_tokens` (by default tokenizer_config.json's, usually false) the text of a special token
        ("<|im_end|>" typed by a user) is ordinary text; added tokens that are not special ("<think>") are still found,
        as in transformers. Lone surrogates are encoded as U+FFFD.
        """
        is_split = self._splits_special_tokens if split_special_tokens is None else split_special_tokens
        return self._post_processor.process(self._encode(text, is_split), add_special_tokens)

    def encode_pair(self, text: str, pair: str, most: int | None = None) -> tuple[list[int], int | None]:
        """The ids of two texts with the special tokens around them, and the first of the second text's type; None if
        the template tells them not apart. With `most` ids the longer text loses its last ones, then both do, as in
        `tokenizers` ("longest_first")."""
        first, second = (self._encode(each, self._splits_special_tokens) for each in (text, pair))
        ids, second_from = self._post_processor.process_pair(first, second)
        if most is not None and len(ids) > most:
            room = max(0, most - len(ids) + len(first) + len(second))
            shorter = min(len(first), len(second), room // 2)
            kept = (shorter, room - shorter) if len(first) <= len(second) else (room - shorter, shorter)
            ids, second_from = self._post_processor.process_pair(first[: kept[0]], second[: kept[1]])
        return ids, second_from

    def encode_first(self, text: str, most: int, add_special_tokens: bool = True) -> list[int]:
        """At most so many ids of a text: it loses its last ones, and keeps the special tokens around it."""
        inner = self._encode(text, self._splits_special_tokens)
        ids = self._post_processor.process(inner, add_special_tokens)
        if len(ids) <= most:
            return ids
        return self._post_processor.process(inner[: max(0, len(inner) - len(ids) + most)], add_special_tokens)

    def encode_ordinary(self, text: str) -> list[int]:
        """The ids of `text` without any added token, special or not, found in it or put around it."""
        ids: list[int] = []
        self._encode_piece(_valid(text), True, ids)
        return ids

    def _encode(self, text: str, split_special_tokens: bool) -> list[int]:
        text = _valid(text)
        if self._finds_added_tokens and leaves_alone(self._normalizer, text):
            assert self._byte_encoder is not None
            return self._byte_encoder.encode(text, True, split_special_tokens)
        ids: list[int] = []
        for piece, start, token_id in self._finder.split(text, split_special_tokens):
            if token_id >= 0:
                ids.append(token_id)
            elif self._normalized_finder is None:
                self._encode_piece(piece, start == 0, ids)
            else:
                self._encode_normalized(piece, start == 0, split_special_tokens, ids)
        return ids

    def _encode_normalized(self, text: str, is_at_start: bool, is_special_split: bool, ids: list[int]) -> None:
        if self._normalizer is not None:
            text, is_at_start = self._normalizer(text, is_at_start)
        assert self._normalized_finder is not None
        for piece, start, token_id in self._normalized_finder.split(text, is_special_split):
            if token_id >= 0:
                ids.append(token_id)
            else:
                self._encode_words(piece, is_at_start and start == 0, ids)

    def _encode_piece(self, text: str, is_at_start: bool, ids: list[int]) -> None:
        if text and self._normalizer is not None:
            text, is_at_start = self._normalizer(text, is_at_start)
        if text:
            self._encode_words(text, is_at_start, ids)

    def _encode_words(self, text: str, is_at_start: bool, ids: list[int]) -> None:
        if self._byte_encoder is not None:
            if self._adds_prefix_space and not text.startswith(" "):
                text = " " + text
            ids += self._byte_encoder.encode(text, False, False)
            return
        words = pre_tokenize(self._steps, text, is_at_start)
        ids.extend(chain.from_iterable(map(self._words.__getitem__, words)))

    # Decoding

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD.

        Ids outside the vocabulary add nothing, as in the `tokenizers` library: a model's
        embedding may be padded beyond the vocabulary. Raises `TokenIdError` for ids that no vocabulary can
        hold.
        """
        return self.decode_but(ids, self._special_ids if skip_special_tokens else frozenset())

    def decode_but(self, ids: Iterable[int], skipped: frozenset[int]) -> str:
        """The text of `ids` without the `skipped` ones."""
        if self.decoder.is_byte_level:
            return self.bytes_of(ids, skipped).decode("utf-8", "replace")
        events: list[str | None] = []
        for token in self.tokens_of(ids, skipped):
            events += (token, None)
        for stage in self.decoder.start():
            events = stage.feed(events) + stage.finish()
        return "".join([event for event in events if event is not None])

    def bytes_of(self, ids: Iterable[int], skipped: frozenset[int]) -> bytes:
        """The bytes of the ids that are not `skipped`, as `token_bytes` gives them."""
        table = self._bytes
        if not skipped:
            return b"".join(map(table.__getitem__, ids))
        return b"".join([table[token_id] for token_id in ids if token_id not in skipped])

    def tokens_of(self, ids: Iterable[int], skipped: frozenset[int]) -> Iterator[str]:
        """The strings of the ids in the vocabulary that are not `skipped`."""
        for token_id in ids:
            token = self._tokens.get(_checked(token_id))
            if token is not None and token_id not in skipped:
                yield token

    # Chat

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder holds a chat template."""
        return bool(self.chat_templates)

    def chat_template(self, name: str | None = None, has_tools: bool = False) -> str:
        """The template of that name; without a name the one for tools if there is one, or the default.

        Raises `ChatTemplateError` when there is none.
        """
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            known = ", ".join(sorted(self.chat_templates)) or "none"
            raise ChatTemplateError(f"the tokenizer has no chat template {name!r} (it has: {known})")
        return self.chat_templates[name]

    def template_forms(self, chat_template: str | None = None, *, has_tools: bool = False) -> TemplateForms:
        """The template's forms of content and calls, found by rendering, once. Raises `ChatTemplateError`."""
        if chat_template is None or chat_template in self.chat_templates:
            chat_template = self.chat_template(chat_template, has_tools=has_tools)
        return forms_of(chat_template, tuple(self._named_tokens.items()), has_tools)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        add_generation_prompt: bool = ...,
        continue_final_message: bool | str = ...,
        tokenize: Literal[True] = ...,
        chat_template: str | None = ...,
        special_tokens_in_content: SpecialTokensInContent = ...,
        replaced: Mapping[str, str] = ...,
        **template_kwargs: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        add_generation_prompt: bool = ...,
        continue_final_message: bool | str = ...,
        *,
        tokenize: Literal[False],
        chat_template: str | None = ...,
        special_tokens_in_content: SpecialTokensInContent = ...,
        replaced: Mapping[str, str] = ...,
        **template_kwargs: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        chat_template: str | None = None,
        special_tokens_in_content: SpecialTokensInContent = "parse",
        replaced: Mapping[str, str] = MappingProxyType({}),
        **template_kwargs: Any,
    ) -> list[int] | str:
        """Render a conversation, and encode it unless `tokenize` is false.

        `chat_template` is a template, or the name of one of the folder's. `template_kwargs` are names that
        the template may read ("enable_thinking", "documents", ...); "now", a datetime, replaces the current time.
        `replaced` maps texts of the rendered conversation to their replacements; in users' strings they stay as they
        are. The template writes its special tokens itself, so none are added.

        Raises `ChatTemplateError`.
        """
        if chat_template is None or chat_template in self.chat_templates:
            chat_template = self.chat_template(chat_template, has_tools=tools is not None)
        documents = template_kwargs.pop("documents", None)
        now = template_kwargs.pop("now", None)
        template = chat_template

        def render(given: Sequence[Any]) -> str:
            rendered = render_chat(
                template,
                given[0],
                tools=given[1],
                documents=given[2],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self._named_tokens, **given[3]},
                now=now,
            )
            for written, meant in replaced.items():
                rendered = rendered.replace(written, meant)
            return rendered

        content = (list(messages), tools, documents, template_kwargs)
        if special_tokens_in_content == "text" and not self._splits_special_tokens:
            marks = self._content_marks(template)
            if marks.concerns(content):
                text, mark = self._render_marked(render, content, marks, free_mark(content, template))
                return self._encode_marked(text, mark) if tokenize else without(text, mark)
        text = render(content)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _content_marks(self, template: str) -> ContentMarks:
        """Marks for special tokens, and for others that separate messages in the template."""
        if (found := self._marks.get(template)) is None:
            tokens = {*self._special_texts, *self._turn_tokens(template)}
            found = self._marks[template] = ContentMarks({token: self._added_ids[token] for token in tokens}, template)
            if len(self._marks) > 64:
                del self._marks[next(iter(self._marks))]
        return found

    def _turn_tokens(self, template: str) -> set[str]:
        """Added tokens, special or not, that the template writes around messages; not white space."""
        for messages in (_PROBE, _PROBE[1:]):
            try:
                text = render_chat(template, messages, variables=self._named_tokens)
            except ChatTemplateError:
                continue
            found = {self._id_to_added[i].content for i in self.encode(text, False) if i in self._id_to_added}
            return {token for token in found if not (token.isspace() or token.isalnum() or is_no_turn(token))}
        return set()

    def _render_marked(
        self, render: Callable[[Sequence[Any]], str], content: Sequence[Any], marks: ContentMarks, mark: str
    ) -> tuple[str, str]:
        """The rendered text with marks in it, and the mark."""
        messages, *rest = content
        exact, exact_in_answers = (marks.exact(mark, is_answer=is_answer) for is_answer in (False, True))
        marked = [
            [mapped(message, exact_in_answers if _is_answer(message) else exact) for message in messages],
            *(mapped(each, exact) for each in rest),
        ]
        text = render(marked)
        strict_text = render([mapped(each, marks.strict(mark)) for each in content])
        turns, strict_turns = (
            [token_id for token_id in self._encode_marked(each, mark) if token_id in marks.turn_ids]
            for each in (text, strict_text)
        )
        return text if turns == strict_turns else strict_text, mark

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """The ids of a text without its marks; added tokens that hold a mark are not found."""
        if without(text, mark) == text:
            return self.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for piece, start, token_id in self._finder.split(_valid(text), False):
            if token_id >= 0:
                ids.append(token_id)
            elif (plain := without(piece, mark)) != piece or self._normalized_finder is None:
                self._encode_piece(plain, start == 0, ids)
            else:
                self._encode_normalized(piece, start == 0, False, ids)
        return ids

    # Construction

    def _add_tokens(self, fields: Fields, files: TokenizerFiles) -> None:
        listed = fields.objects("added_tokens") if fields.get("added_tokens") is not None else []
        for entry in listed:
            self._add_token(AddedToken.read(entry), entry.count("id"), fields)
        for token_id, token in files.config_tokens:
            self._add_token(token, token_id, Fields({}, "tokenizer_config.json"))
        for token in [*files.named_tokens.values(), *files.extra_special_tokens]:
            if token.content in self._added_ids:
                continue
            place = self._model.vocab.get(token.content, self._next_id())
            if token.content in self._model.vocab or place < files.num_embeddings:
                self._add_token(token, place, fields)  # otherwise it stays a mere name: the model has no such id

    def _next_id(self) -> int:
        """The id of a token that is added after the vocabulary."""
        return max(len(self._model.vocab), max(self._id_to_added, default=-1) + 1)

    def _add_token(self, token: AddedToken, declared_id: int, source: Fields) -> None:
        if not token.content:
            return
        known_id = declared_id if self._has_own_ids else self.token_to_id(token.content)
        if known_id is None:
            known_id = self._next_id()
        if known_id != declared_id:  # the library also warns, and uses the vocabulary's
            warn_once(
                f"{source.file}: added_tokens: {shown(token.content)} is declared with id {declared_id}, but has id"
                f" {known_id} by the vocabulary and its place; {known_id} is taken"
            )
        self._id_to_added[known_id] = token
        self._added_ids[token.content] = known_id

    def _set_added_bos_eos(self, files: TokenizerFiles) -> None:
        """Adds BOS and EOS for files without a post-processor."""
        if files.add_bos_token or files.add_eos_token:
            bos = [self.bos_token_id] if files.add_bos_token else []
            eos = [self.eos_token_id] if files.add_eos_token else []
            before, after = ([i for i in ids if i is not None] for ids in (bos, eos))
            self._post_processor = PostProcessor(([before, None, after],))

    def _index_tokens(self) -> None:
        self._tokens = dict(zip(self._model.vocab.values(), self._model.vocab))
        plain: list[tuple[str, int, AddedToken]] = []
        normalized: list[tuple[str, int, AddedToken]] = []
        for token_id, token in self._id_to_added.items():
            text = token.content
            if token.is_normalized and self._normalizer is not None:
                text = self._normalizer(text, True)[0]
            (normalized if token.is_normalized else plain).append((text, token_id, token))
            self._tokens[token_id] = text
        self._finder = AddedTokenFinder(plain)
        self._normalized_finder = AddedTokenFinder(normalized) if normalized else None
        special = self._special_texts
        self._special_ids = frozenset(token_id for token_id in self._id_to_added if self._tokens[token_id] in special)
        self._vocab_size = max(self._tokens, default=-1) + 1
        self._bytes = _TokenBytes(self)

    def _build_byte_encoder(self) -> ByteEncoder | None:
        """The compiled encoder, if it supports the words and the model; else None."""
        self._adds_prefix_space = self._finds_added_tokens = False
        found = word_pattern(self._steps)
        model = self._model
        if found is None or not isinstance(model, BpeModel) or not model.is_byte_level:
            return None
        self._adds_prefix_space, pattern = found
        try:
            automaton = compile_automaton(pattern)
        except NotTabularError:
            return None
        finders = [finder for finder in (self._finder, self._normalized_finder) if finder and finder.tokens]
        self._finds_added_tokens = (
            not self._adds_prefix_space and len(finders) <= 1 and not any(finder.has_rules for finder in finders)
        )
        sought = finders[0].tokens if finders and self._finds_added_tokens else {}
        added = [(text, token_id, token.is_special) for text, (token_id, token) in sought.items()]
        return ByteEncoder(automaton, model.table, model.letter_symbols(), model.ignores_merges, added)

    def _named_id(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self.token_to_id(token)


class _TokenBytes(dict[int, bytes]):
    """Bytes by id, made when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(_checked(token_id))
        if token is None:
            return b""
        found = self[token_id] = self._tokenizer.decoder.token_bytes(token)
        return found


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _build_model(fields: Fields, files: TokenizerFiles) -> BpeModel | UnigramModel | WordPieceModel | WordLevelModel:
    """The model of a "model" object. Raises `TokenizerFileError`."""
    if fields.get("type") == "WordLevel":
        return WordLevelModel(fields)
    if fields.get("type") == "WordPiece":
        return WordPieceModel(fields)
    if fields.get("type") == "Unigram":
        return UnigramModel(fields)
    return BpeModel(fields, passes_over_merges=files.passes_over_merges)


def _check_top_level(fields: Fields) -> None:
    if fields.string("version", "1.0") != "1.0":
        fields.wrong("version", '"1.0"')


def _checked(token_id: int) -> int:
    if not 0 <= token_id < _ID_LIMIT:
        raise TokenIdError(f"the token id {token_id} is not between 0 and 2**32 - 1")
    return token_id


def _valid(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return replace_surrogates(text)
    return text
