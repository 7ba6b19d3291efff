# ruff: noqa: F405
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
    from runtime import *  # noqa: F403

__all__ = [  # noqa: RUF022 (as a reader meets them)
    "LLM",
    "AsyncLLM",
    "EngineArgs",
    "AsyncEngineArgs",
    "SamplingParams",
    "LoRARequest",
    "LogitsKernel",
    "StructuredOutputsParams",
    "RequestOutputKind",
    "BeamSearchParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "EmbeddingRequestOutput",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "DecisionOutput",
    "EmbeddingOutput",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "shared_weights",
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
