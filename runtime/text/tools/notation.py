"""A notation: how a family of models writes tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.text.tools.reader import Reader

ArgumentStyle = Literal["json", "qwen3_coder", "glm45", "python", "gemma"]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around a forced call's arguments. NAME is replaced by the function's name.

    before, between, after  around all calls, and between two
    head, tail              of each
    arguments               their style: one JSON object, or one by one
    """

    head: str
    tail: str
    before: str = ""
    between: str = ""
    after: str = ""
    arguments: ArgumentStyle = "json"


@dataclass(frozen=True, slots=True)
class Notation:
    """
    name       ours; names: the equivalent values of vLLM's `--tool-call-parser`
    read       finds the calls in an answer, or None if the format has a parser of its own (harmony)
    form       of a forced call
    markers    texts that count only if sampled as special tokens, in models that have them as such
    is_in      detects it in a chat template's text
    short_ids  calls have ids of nine letters and digits
    """

    name: str
    read: Reader | None = field(repr=False)
    form: CallForm = field(repr=False)
    markers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    is_in: Callable[[str], bool] = field(default=lambda template: False, repr=False)
    short_ids: bool = False


@dataclass(frozen=True, slots=True)
class ToolReading:
    """Settings for parsing the calls of one answer.

    functions  the parameters' JSON schemas of the permitted functions
    is_closed  True: a call of any other function is content
    parallel   False: only the first call is kept
    """

    notation: Notation
    functions: Mapping[str, Any] = field(default_factory=dict)
    is_closed: bool = False
    parallel: bool = True

    @classmethod
    def of(
        cls, notation: Notation, tools: Sequence[Mapping[str, Any]], *, is_closed: bool = False, parallel: bool = True
    ) -> ToolReading:
        """`tools`: checked, in OpenAI's form."""
        functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        return cls(notation, functions, is_closed, parallel)
