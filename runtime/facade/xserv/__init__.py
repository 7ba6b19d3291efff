"""xserv: an LLM inference engine in Python alone.

    from xserv import LLM, SamplingParams

    with LLM() as llm:
        print(llm.generate("Hello", SamplingParams(max_tokens=32))[0].outputs[0].text)

The names are vLLM's, and are imported when they are first used. That raises ``ImportError`` where a folder of the
user's hides one of the packages that this one stands on (``runtime``, ``models``, ``server``, ``tokenizer``,
``numba_kernels``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xserv._packages import own_packages

if TYPE_CHECKING:
    from runtime import LLM as LLM
    from runtime import AsyncEngineArgs as AsyncEngineArgs
    from runtime import AsyncLLM as AsyncLLM
    from runtime import BeamSearchOutput as BeamSearchOutput
    from runtime import BeamSearchParams as BeamSearchParams
    from runtime import BeamSearchSequence as BeamSearchSequence
    from runtime import CompletionOutput as CompletionOutput
    from runtime import EmbeddingOutput as EmbeddingOutput
    from runtime import EmbeddingRequestOutput as EmbeddingRequestOutput
    from runtime import EngineArgs as EngineArgs
    from runtime import Logprob as Logprob
    from runtime import RequestOutput as RequestOutput
    from runtime import RequestOutputKind as RequestOutputKind
    from runtime import SamplingParams as SamplingParams
    from runtime import StructuredOutputsParams as StructuredOutputsParams
    from runtime import XservError as XservError

__all__ = [  # noqa: RUF022 (as a reader meets them)
    "LLM",
    "AsyncLLM",
    "EngineArgs",
    "AsyncEngineArgs",
    "SamplingParams",
    "StructuredOutputsParams",
    "RequestOutputKind",
    "BeamSearchParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "EmbeddingRequestOutput",
    "EmbeddingOutput",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "XservError",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'xserv' has no attribute {name!r}")
    problem = own_packages().hidden_package()
    if problem is not None:
        raise ImportError(problem, name="xserv")
    import runtime

    return getattr(runtime, name)


def __dir__() -> list[str]:
    return sorted(__all__)
