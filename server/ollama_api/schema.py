"""The requests of Ollama's `/api`. Fields without effect and unsupported ones are in `server.openai_api.fields`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from server.names import tagged
from server.openai_api.extensions import EXTENSIONS
from server.openai_api.schema import MAX_TOOLS, Int, ReasoningEffort, Tool, held

Think = bool | ReasoningEffort


class OllamaOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters by Ollama's names; 0, -1 and -2 are no limit as `num_predict`, and -1 no seed."""

    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    mirostat: Int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    num_predict: Int | None = None


CHAT_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "typical_p": "typical_p",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
}
"""A chat's name of each option."""


class AnswerFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The common fields of `/api/chat` and `/api/generate`.

    stream    default: true
    format    "json" for some JSON object, or a schema; "" has no effect
    think     whether the model may think; a level is the chat template's `reasoning_effort`, if it has one
    logprobs, top_logprobs  as in a chat
    """

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class OllamaChatRequest(AnswerFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/chat`. Without messages it only asks for the model to be loaded, which has no effect."""

    messages: Annotated[list[dict[str, Any]], held(OllamaMessage)] | None = None
    tools: Annotated[list[dict[str, Any]], held(Tool, max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(AnswerFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/generate`: a chat of one turn, or with `raw` the continuation of the prompt itself. Without a prompt
    it only asks for the model to be loaded, which has no effect. images: base64, of a model that reads them."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/embed`.

    truncate  inputs that are longer than the context are cut at their end (default: true)
    """

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/embeddings`, the older form: one text, whose vector keeps its length."""

    model: str
    prompt: str


class OllamaShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/show`. name: the older name of `model`."""

    model: str | None = None
    name: str | None = None


# The conversation


class OllamaFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]
    index: Int | None = None


class OllamaToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """images: base64, of a model that reads them; they stand before the text, or at its "[img]" and "[img-0]"."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


OLLAMA_PARTS = (OllamaMessage, OllamaOptions)
"""Types that no other names: the requests hold them as plain objects, so that an error can tell which one it means."""

WITHOUT_EFFECT = (
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict", "numa",
    "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "repeat_last_n",
    "tfs_z", "penalize_newline",
)  # fmt: skip
"""Ollama's options among `EXTENSIONS`."""

_NULL = {"type": "null"}


def complete_ollama(components: dict[str, Any], model_names: Sequence[str], *, reads_images: bool) -> None:
    """Put the parts into the requests' schemas, and the model's other names."""
    for request in ("OllamaChatRequest", "OllamaGenerateRequest"):
        fields = components[request]["properties"]
        fields["options"] = {"anyOf": [_reference(OllamaOptions), _NULL], "default": None}
        fields["format"] = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, _NULL], "default": None}
    for name in ("OllamaMessage", "OllamaGenerateRequest"):
        images: dict[str, Any] = {"type": "array", "items": {"type": "string", "minLength": 1}}
        if not reads_images:
            images["maxItems"] = 0
        components[name]["properties"]["images"] = {"anyOf": [images, _NULL], "default": None}
    components["OllamaOptions"]["additionalProperties"] = True
    options = components["OllamaOptions"]["properties"]
    options |= {name: {"description": f"No effect: {EXTENSIONS[name]}."} for name in WITHOUT_EFFECT}
    for request in ("OllamaChatRequest", "OllamaGenerateRequest", "OllamaEmbedRequest", "OllamaEmbeddingsRequest"):
        fields = components[request]["properties"]
        for name in ("keep_alive", "options"):
            fields.setdefault(name, {"description": f"No effect: {EXTENSIONS[name]}."})
    for name, schema in components.items():
        if name.startswith("Ollama") and "model" in schema.get("properties", {}):
            schema["properties"]["model"]["enum"] += map(tagged, model_names)
    components["OllamaShowRequest"]["properties"]["name"] = components["OllamaShowRequest"]["properties"]["model"]


def _reference(part: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{part.__name__}"}
