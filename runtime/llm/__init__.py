"""A model in this process: ``LLM`` for scripts and notebooks, ``AsyncLLM`` for programs on asyncio.

Both are users of ``EngineClient`` like the server. ``loaded_model`` is what they share, ``job`` a request on its way,
``prompts`` and ``outputs`` what goes in and comes out, ``beam_search`` a search over many requests.
"""

from runtime.llm.async_llm import AsyncLLM
from runtime.llm.beam_search import BeamSearchParams
from runtime.llm.llm import LLM
from runtime.llm.loaded_model import AsyncEngineArgs, EngineArgs
from runtime.llm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
)

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "Logprob",
    "RequestOutput",
]
