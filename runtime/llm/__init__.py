"""A model in this process: ``LLM`` for scripts and notebooks, ``AsyncLLM`` for programs on asyncio.

Both are clients of ``EngineClient`` like the server. ``loaded_model`` is their common part, ``job`` an open request,
``prompts`` and ``outputs`` their inputs and outputs, ``beam_search`` a search over many requests.
"""

from models.checkpoints.given_weights import shared_weights
from runtime.llm.async_llm import AsyncLLM
from runtime.llm.beam_search import BeamSearchParams
from runtime.llm.llm import LLM
from runtime.llm.loaded_model import AsyncEngineArgs, EngineArgs
from runtime.llm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    DecisionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from runtime.llm.prompts import LoRARequest

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "DecisionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "shared_weights",
]
