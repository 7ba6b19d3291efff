"""Schema details of Ollama's `/api` that its types do not express."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.ollama_api.request import tagged
from server.ollama_api.schema import OllamaMessage, OllamaOptions
from server.openai_api.extensions import EXTENSIONS
from server.openai_api.schema import Tool

PARTS = (OllamaMessage, OllamaOptions)
"""Types that no other names: the requests hold them as plain objects, so that an error can tell which one it means."""

WITHOUT_EFFECT = (
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict", "numa",
    "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "repeat_last_n",
    "typical_p", "tfs_z", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline",
)  # fmt: skip
"""Ollama's options among `EXTENSIONS`."""

_NULL = {"type": "null"}


def complete(components: dict[str, Any], model_names: Sequence[str], *, reads_images: bool) -> None:
    """Put the parts into the requests' schemas, and the model's other names."""
    for request in ("OllamaChatRequest", "OllamaGenerateRequest"):
        fields = components[request]["properties"]
        fields["options"] = {"anyOf": [_reference(OllamaOptions), _NULL], "default": None}
        fields["format"] = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, _NULL], "default": None}
    chat = components["OllamaChatRequest"]["properties"]
    messages = {"type": "array", "items": _reference(OllamaMessage)}
    tools = {"type": "array", "items": _reference(Tool), "maxItems": 128}
    chat["messages"] = {"anyOf": [messages, _NULL], "default": None}
    chat["tools"] = {"anyOf": [tools, _NULL], "default": None}
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
