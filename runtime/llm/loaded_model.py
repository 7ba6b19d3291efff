"""The common part of ``LLM`` and ``AsyncLLM``: a loaded model with its engine in a thread, or several in processes, its
tokenizer, and the conversion of prompts to requests."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from models.configuration.generation_config import recommended_sampling
from runtime.engine.checks import is_integer
from runtime.engine.config import OPTIONS, EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.grammar.compiling import GrammarChecker
from runtime.engine.grammar.matcher import LazyVocabulary
from runtime.engine.make_client import is_fleet, start_client
from runtime.engine.make_engine import engine_of  # imports the kernels
from runtime.engine.messages import AdapterRef, EngineRequest, ImageItem, PoolingRequest
from runtime.engine.option_names import known_options
from runtime.engine.process.compile_ahead import compile_ahead as compile_kernels_ahead
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams, last_tokens
from runtime.llm.job import Job
from runtime.llm.outputs import EmbeddingOutput, EmbeddingRequestOutput
from runtime.llm.prompts import LoRARequest, Prompt, check_tools, ids_of, scheduling_of, with_images
from runtime.llm.weights import ChangingWeights
from runtime.pooling import PoolingTask, normalized
from runtime.progress import ON_STDERR, SILENT
from runtime.text.chat import chat_prompt
from runtime.text.content import PictureText, picture_text, with_picture_texts
from runtime.text.dry_breakers import with_dry_breakers
from runtime.text.formats import AnswerFormat, end_ids
from runtime.text.load import load_tokenizer, read_chat_template, read_tokenizer
from runtime.text.pooled_texts import check_cut, num_unpooled, pair_of, prompted
from runtime.text.stop import bad_words_token_ids
from runtime.text.turns import turn_start_id
from tokenizer import Tokenizer
from tokenizer.warn import warn_once


class AskedPooling(NamedTuple):
    """A prompt to embed, classify or rank: its text (None if it was not given as one), ids and images, the salt that
    encoded images are shared within, the first token of the second of two texts, and how many first tokens are not
    pooled."""

    text: str | None
    token_ids: list[int]
    images: tuple[ImageItem, ...]
    salt: str | None
    second_from: int | None
    num_unpooled: int = 0

    def request(self, pooling: str | None, task: PoolingTask = "embed") -> PoolingRequest:
        return PoolingRequest(
            self.token_ids, pooling, self.images, self.salt, task, self.second_from, self.num_unpooled
        )


class EngineArgs:
    """The arguments of ``LLM`` or ``AsyncLLM``, for ``from_engine_args``, which checks them; vLLM's name."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.model = model
        self.options = options


AsyncEngineArgs = EngineArgs


class LoadedModel(ChangingWeights):
    """A loaded model with its engine in a thread of this process, or with several (``data_parallel_size``) in processes
    of their own; a context manager.

    model      folder, hub id, or None for the bundled model
    tokenizer  a ``Tokenizer``, a folder or a GGUF file; by default the model's. A model without one serves token ids.
    chat_template  a Jinja template, or a file that holds one, instead of the tokenizer's own
    skip_tokenizer_init  no tokenizer is loaded: token ids in, token ids out
    compile_ahead     compile all kernels before loading; if False, each on first use
    kv_cache_memory_bytes  vLLM's name of the setting ``kv_cache_bytes``
    use_tqdm_on_load  show progress on stderr if loading takes over a second

    settings   ``EngineConfig``'s; seed is 0 by default (None for a fresh one each run)

    Raises ``ModelLoadError``, ``TokenizerFileError``, ``DeviceError``, ``RequestError``.
    """

    @known_options(*(each.name for each in OPTIONS))
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        chat_template: str | None = None,
        skip_tokenizer_init: bool = False,
        compile_ahead: bool = True,
        use_tqdm_on_load: bool = True,
        kv_cache_memory_bytes: int | None = None,
        **settings: Any,
    ) -> None:
        settings.setdefault("seed", 0)
        if kv_cache_memory_bytes is not None:
            if settings.get("kv_cache_bytes", kv_cache_memory_bytes) != kv_cache_memory_bytes:
                other = settings["kv_cache_bytes"]
                problem = f"kv_cache_memory_bytes is {kv_cache_memory_bytes}, but kv_cache_bytes is {other}: give one"
                raise RequestError(problem, param="kv_cache_memory_bytes")
            settings["kv_cache_bytes"] = kv_cache_memory_bytes
        config = EngineConfig(**settings)
        self._adapters: dict[LoRARequest, AdapterRef] = {}
        reporter = ON_STDERR if use_tqdm_on_load else SILENT
        template = read_chat_template(chat_template)
        if template is not None and not (tokenizer is None or isinstance(tokenizer, (str, Path))):
            raise RequestError("chat_template is given beside a Tokenizer, which has its own", param="chat_template")
        if is_fleet(config):
            if not (tokenizer is None or skip_tokenizer_init):
                problem = "tokenizer is given for engines in processes of their own, which read the model's"
                raise RequestError(problem, param="tokenizer")
            self.client = start_client(model, **settings)
        else:
            if compile_ahead:
                compile_kernels_ahead(model, config, reporter)
            engine = engine_of(model, config, reporter)
            self.client = ThreadEngineClient(engine)
        info = self.client.info
        self.tokenizer: Tokenizer | None
        if skip_tokenizer_init:
            self.tokenizer = None
        elif tokenizer is None:
            self.tokenizer = load_tokenizer(info.model_path, template)
        elif isinstance(tokenizer, (str, Path)):
            self.tokenizer = read_tokenizer(tokenizer, template)
        else:
            self.tokenizer = tokenizer
        known_tokenizer = self.tokenizer  # not through self, which the engine would keep alive
        vocabulary = LazyVocabulary(lambda: known_tokenizer, info.vocab_size, info.eos_token_ids)
        if not is_fleet(config):
            engine.vocabulary = vocabulary
        self._grammars = GrammarChecker(vocabulary)
        self._request_ids = itertools.count()
        self._finalizer = weakref.finalize(self, self.client.close)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The same as the constructor with these arguments; vLLM's name."""
        return cls(engine_args.model, **engine_args.options)

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``RequestError`` if it has none."""
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer: it takes token ids", param="tokenizer")
        return self.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """The recommendations of the model's ``generation_config.json``, over ``SamplingParams``' defaults."""
        return SamplingParams(**recommended_sampling(self.client.info.model_path))

    @known_options()
    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens_in_content: Literal["parse", "text"] = "text",
    ) -> list[int]:
        """The token ids of a conversation, by the model's chat template. A warning in the log names the parts that the
        template leaves out. Raises ``RequestError``.

        tools                   functions that the model may call, in OpenAI's form; a template that leaves them out
                                gets them in a system message
        add_generation_prompt   the prompt ends where the assistant's answer begins
        continue_final_message  the answer continues the last message
        chat_template           a template instead of the model's
        chat_template_kwargs    names that the template may read (``{"enable_thinking": False}``)
        special_tokens_in_content  "text": special tokens in messages stay text, so that none can forge turns; "parse":
                                they become tokens
        """
        check_tools(tools)
        for name, value, kind in (
            ("chat_template", chat_template, str), ("chat_template_kwargs", chat_template_kwargs, Mapping),
        ):  # fmt: skip
            if not isinstance(value, kind | None):
                raise RequestError(f"{name} must be a {kind.__name__}, got {type(value).__name__}", param=name)
        answer_format = AnswerFormat() if chat_template is not None else self._answer_format
        notes = list[str]()
        ids = chat_prompt(
            self.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            special_tokens_in_content=special_tokens_in_content,
            told_tools=answer_format.tools if answer_format.tells_tools and tools is not None else None,
            harmony=answer_format.renders_harmony,
            picture_text=self._picture_text,
            notes=notes,
            **(chat_template_kwargs or {}),
        )
        if notes:
            warn_once(f"the chat template does not read {', '.join(notes)}")
        return ids

    @functools.cached_property
    def _picture_text(self) -> PictureText:
        return picture_text(self.tokenizer, self.client.info.images)

    @functools.cached_property
    def _answer_format(self) -> AnswerFormat:
        return AnswerFormat.of(self.tokenizer)

    def _job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        answer_format: AnswerFormat | None = None,
        request_id: str | None = None,
        template: str | None = None,
        adapter: AdapterRef | None = None,
        *,
        restarts: bool = False,
    ) -> Job:
        text, token_ids = self._encode(prompt, takes_images=True)
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise RequestError(f"sampling_params must be SamplingParams, got {kind}", param="sampling_params")
        if params.bad_words:
            ids = bad_words_token_ids(params.bad_words, self.tokenizer) + (params.bad_words_token_ids or [])
            params = msgspec.structs.replace(params, bad_words=None, bad_words_token_ids=ids)
        params = with_dry_breakers(params, self.tokenizer)
        self._grammars.check(params.grammar)
        token_ids, images = self._with_images(prompt, token_ids)
        if (most := params.truncate_prompt_tokens) is not None:
            if images:
                problem = f"truncate_prompt_tokens is {most}, must be None for a prompt with images: it is never cut"
                raise RequestError(problem, param="truncate_prompt_tokens")
            token_ids = last_tokens(token_ids, most, self.client.info.max_model_len - max(1, params.max_tokens or 1))
            params = msgspec.structs.replace(params, truncate_prompt_tokens=None)
        request = EngineRequest(
            request_id=request_id or self._new_id(),
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=end_ids(answer_format or AnswerFormat(), self.tokenizer, self.client.info.eos_token_ids),
            images=images,
            turn_start_id=turn_start_id(self.tokenizer, template) if self.client.info.has_states else None,
            adapter=adapter,
            restarts=restarts,
            **scheduling_of(prompt),
        )
        return Job(request, text, self.tokenizer, answer_format or AnswerFormat())

    def _adapter_of(self, asked: LoRARequest | None) -> AdapterRef | None:
        """The adapter of a request, which is read when it first comes. Raises ``RequestError``."""
        if asked is None:
            return None
        if not isinstance(asked, LoRARequest):
            kind = type(asked).__name__
            raise RequestError(f"lora_request must be a LoRARequest, got {kind}", param="lora_request")
        found = self._adapters.get(asked)
        if found is None:
            path = str(Path(asked.lora_path).expanduser().resolve())
            digest = self.client.load_adapter(asked.lora_name, path).result()
            found = self._adapters[asked] = AdapterRef.of(asked.lora_name, path, digest)
        return found

    def _with_images(self, prompt: Prompt, token_ids: list[int]) -> tuple[list[int], tuple[ImageItem, ...]]:
        """A prompt's ids with those of its images, and the images."""
        if isinstance(prompt, Mapping) and prompt.get("images"):
            return with_images(token_ids, prompt["images"], self.client.info)
        return token_ids, ()

    def _asked_embedding(
        self, prompt: Prompt, prompt_name: str | None = None, most: int | None = None
    ) -> AskedPooling:  # fmt: skip
        """A prompt to pool; texts after the model's prompt of that name, or its default one, and cut if they have more
        than so many tokens."""
        if isinstance(prompt, list) and most is None and not prompt_name:
            return AskedPooling(None, list(prompt), (), None, None)
        pooling = self.client.info.pooling
        if isinstance(prompt, Mapping) and "text_pair" in prompt:
            first, second = prompt.get("prompt"), prompt["text_pair"]
            if not (isinstance(first, str) and isinstance(second, str)):
                raise RequestError("a prompt with 'text_pair' needs two texts, 'prompt' and it", param="prompt")
            return self._asked_pair(first, second, most)
        if most is not None and not (isinstance(prompt, str) and self.tokenizer is not None):
            raise RequestError("truncate_prompt_tokens is for prompts that are texts", param="truncate_prompt_tokens")
        left_out = 0
        if isinstance(prompt, str):
            prompt = prompted(prompt, pooling, prompt_name)
            if self.tokenizer is not None:
                left_out = num_unpooled(self.tokenizer, pooling, prompt_name)
            if (room := self._room(most)) is not None and self.tokenizer is not None:
                ids = self.tokenizer.encode_first(prompt, room)
                check_cut(ids, most)
                return AskedPooling(prompt, ids, (), None, None, left_out)
        elif prompt_name:
            raise RequestError("prompt_name is for prompts that are texts", param="prompt_name")
        text, token_ids = self._encode(prompt, takes_images=True)
        if not isinstance(prompt, Mapping):
            return AskedPooling(text, token_ids, (), None, None, left_out)
        return AskedPooling(text, *self._with_images(prompt, token_ids), prompt.get("cache_salt"), None, left_out)

    def _room(self, most: int | None) -> int | None:
        """The tokens that `truncate_prompt_tokens` leaves of a text."""
        if most is None:
            return None
        if not is_integer(most) or most < -1 or most == 0:
            raise RequestError(
                f"truncate_prompt_tokens must be an integer, -1 or above 0, got {most!r:.80}",
                param="truncate_prompt_tokens",
            )
        longest = self.client.info.max_model_len
        return longest if most == -1 else min(most, longest)

    def _asked_pair(self, query: str, document: str, most: int | None) -> AskedPooling:
        """A query and a document to rank."""
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer: it has no scores of texts", param="data_1")
        token_ids, second_from = pair_of(self.tokenizer, self.client.info.pooling, query, document, self._room(most))
        check_cut(token_ids, most)
        return AskedPooling(None, token_ids, (), None, second_from)

    def _new_id(self) -> str:
        return f"llm-{next(self._request_ids)}"

    def _shaped(
        self, vector: NDArray[np.float32], normalize: bool | None, dimensions: int | None
    ) -> NDArray[np.float32]:  # fmt: skip
        """A vector cut and normalised, by default as the model's folder says."""
        if dimensions is not None and not (is_integer(dimensions) and 1 <= dimensions <= len(vector)):
            problem = f"dimensions must be an integer from 1 to {len(vector)}, got {dimensions!r:.80}"
            raise RequestError(problem, param="dimensions")
        if normalize is None:
            normalize = self.client.info.pooling.normalize or dimensions is not None
        return normalized(vector[:dimensions]) if normalize else vector[:dimensions]

    def _embedded(
        self, asked: AskedPooling, vector: NDArray[np.float32], normalize: bool | None, dimensions: int | None
    ) -> EmbeddingRequestOutput:
        """An embedding in the form for users."""
        numbers = self._shaped(vector, normalize, dimensions).tolist()
        return EmbeddingRequestOutput(self._new_id(), asked.text, asked.token_ids, EmbeddingOutput(numbers))

    def _encode(self, prompt: Prompt, *, takes_images: bool = False) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if prompt.get("images") and not takes_images:
                raise RequestError("images are read by generate, chat, stream and embed alone", param="images")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), ids_of("prompt_token_ids", prompt["prompt_token_ids"])
            if not isinstance(prompt.get("prompt"), str):
                raise RequestError("a prompt needs 'prompt_token_ids' or the text 'prompt'", param="prompt")
            text = prompt["prompt"]
            if prompt.get("images"):
                text = with_picture_texts(text, self._picture_text.replaced)
            return self._encode(text, takes_images=takes_images)
        if not isinstance(prompt, str):
            return None, ids_of("prompt", prompt)
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer: give token ids instead of text", param="prompt")
        return prompt, self.tokenizer.encode(prompt)
