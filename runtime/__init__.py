"""The inference runtime. The public names of the package `xserv` are imported lazily, each when it is first used.

Example: `from xserv import LLM, SamplingParams`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine.grammar.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from runtime.engine.logits.processors import LogitsKernel as LogitsKernel
    from runtime.engine.sampling_params import RequestOutputKind as RequestOutputKind
    from runtime.engine.sampling_params import SamplingParams as SamplingParams
    from runtime.errors import XservError as XservError
    from runtime.llm import LLM as LLM
    from runtime.llm import AsyncEngineArgs as AsyncEngineArgs
    from runtime.llm import AsyncLLM as AsyncLLM
    from runtime.llm import BeamSearchOutput as BeamSearchOutput
    from runtime.llm import BeamSearchParams as BeamSearchParams
    from runtime.llm import BeamSearchSequence as BeamSearchSequence
    from runtime.llm import ClassificationOutput as ClassificationOutput
    from runtime.llm import ClassificationRequestOutput as ClassificationRequestOutput
    from runtime.llm import CompletionOutput as CompletionOutput
    from runtime.llm import DecisionOutput as DecisionOutput
    from runtime.llm import EmbeddingOutput as EmbeddingOutput
    from runtime.llm import EmbeddingRequestOutput as EmbeddingRequestOutput
    from runtime.llm import EngineArgs as EngineArgs
    from runtime.llm import Logprob as Logprob
    from runtime.llm import LoRARequest as LoRARequest
    from runtime.llm import PoolingOutput as PoolingOutput
    from runtime.llm import PoolingRequestOutput as PoolingRequestOutput
    from runtime.llm import RequestOutput as RequestOutput
    from runtime.llm import ScoringOutput as ScoringOutput
    from runtime.llm import ScoringRequestOutput as ScoringRequestOutput
    from runtime.llm import shared_weights as shared_weights
    from runtime.tensor.tensor import Tensor as Tensor

_HOME = {
    "LLM": "runtime.llm",
    "AsyncLLM": "runtime.llm",
    "EngineArgs": "runtime.llm",
    "AsyncEngineArgs": "runtime.llm",
    "SamplingParams": "runtime.engine.sampling_params",
    "LoRARequest": "runtime.llm",
    "LogitsKernel": "runtime.engine.logits.processors",
    "RequestOutputKind": "runtime.engine.sampling_params",
    "StructuredOutputsParams": "runtime.engine.grammar.structured_outputs",
    "BeamSearchParams": "runtime.llm",
    "RequestOutput": "runtime.llm",
    "CompletionOutput": "runtime.llm",
    "Logprob": "runtime.llm",
    "EmbeddingRequestOutput": "runtime.llm",
    "ClassificationOutput": "runtime.llm",
    "ClassificationRequestOutput": "runtime.llm",
    "PoolingOutput": "runtime.llm",
    "PoolingRequestOutput": "runtime.llm",
    "ScoringOutput": "runtime.llm",
    "ScoringRequestOutput": "runtime.llm",
    "DecisionOutput": "runtime.llm",
    "EmbeddingOutput": "runtime.llm",
    "BeamSearchOutput": "runtime.llm",
    "BeamSearchSequence": "runtime.llm",
    "shared_weights": "runtime.llm",
    "XservError": "runtime.errors",
    "Tensor": "runtime.tensor.tensor",
}

__all__ = [*_HOME]
"""In reading order."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
