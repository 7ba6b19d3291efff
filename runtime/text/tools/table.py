"""The table of notations, one entry a family; the first that a chat template shows is the model's.

Notations are described in their readers. A new one is an entry here, and a reader if none of the existing ones fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.text.tools.json_calls import (
    DEEPSEEK_MARKERS,
    bare_json_objects,
    fenced_objects,
    json_objects,
    lines_of_names,
    named_objects,
)
from runtime.text.tools.literals import gemma_calls, python_calls
from runtime.text.tools.notation import CallForm, Notation
from runtime.text.tools.tagged_calls import glm_calls, qwen3_coder_calls


def _has(*signs: str, but: str | None = None) -> Callable[[str], bool]:
    return lambda template: any(sign in template for sign in signs) and (but is None or but not in template)


_OBJECT = '{"name": "NAME", "arguments": '

HERMES = Notation(
    "hermes",
    json_objects(("<tool_call>",), ("</tool_call>",)),
    CallForm(f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", between="\n"),
    markers=("<tool_call>", "</tool_call>"),
    is_in=_has("<tool_call>"),
)
"""Hermes, Qwen2.5, Qwen3, Granite 4 and many others."""

QWEN3_CODER = Notation(
    "qwen3_coder",
    qwen3_coder_calls,
    CallForm("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", between="\n", arguments="qwen3_coder"),
    markers=("<tool_call>", "</tool_call>"),
    names=("qwen3_xml",),
    is_in=_has("<function="),
)

GLM45 = Notation(
    "glm45",
    glm_calls,
    CallForm("<tool_call>NAME\n", "</tool_call>", between="\n", arguments="glm45"),
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    names=("glm47",),
    is_in=_has("<arg_key>"),
)

GLM4 = Notation(
    "glm4",
    lines_of_names,
    CallForm("NAME\n", "", between="\n"),
    is_in=lambda template: "<|observation|>" in template and "<arg_key>" not in template,
)
"""GLM-4 before 4.5."""

_MISTRAL_READER = named_objects("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

MISTRAL = Notation(
    "mistral",
    _MISTRAL_READER,
    CallForm(_OBJECT, "}", before="[TOOL_CALLS][", between=", ", after="]"),
    markers=_MISTRAL_MARKERS,
    is_in=_has("[TOOL_CALLS]"),
    short_ids=True,
)
"""Mistral's tokenizers v3 to v7. Either reads what the other writes, too."""

MISTRAL_V11 = Notation(
    "mistral_v11",
    _MISTRAL_READER,
    CallForm("[TOOL_CALLS]NAME[ARGS]", ""),
    markers=_MISTRAL_MARKERS,
    is_in=_has("[ARGS]"),
    short_ids=True,
)
"""v11 and later."""

LLAMA3 = Notation(
    "llama3_json",
    bare_json_objects(("<|python_tag|>",), has_methods=True),
    CallForm('{"name": "NAME", "parameters": ', "}", between="; "),
    markers=("<|python_tag|>",),
    names=("llama4_json",),
    is_in=_has("<|python_tag|>", '"parameters": dictionary of argument name'),
)

GRANITE = Notation(
    "granite",
    json_objects(("<|tool_call|>", "<tool_call>")),
    CallForm(_OBJECT, "}", before="<|tool_call|>[", between=", ", after="]"),
    markers=("<|tool_call|>",),
    is_in=_has("<|tool_call|>", but="<|/tool_call|>"),
)
"""Granite 3."""

PHI4 = Notation(
    "phi4_mini_json",
    json_objects(("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
    CallForm(_OBJECT, "}", before="<|tool_call|>[", between=", ", after="]<|/tool_call|>"),
    markers=("<|tool_call|>", "<|/tool_call|>"),
    is_in=_has("<|/tool_call|>", "functools[", "<|tool|>"),
)

DEEPSEEK_V3 = Notation(
    "deepseek_v3",
    fenced_objects,
    CallForm(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
    ),
    markers=DEEPSEEK_MARKERS,
    is_in=lambda template: "<｜tool▁sep｜>" in template and "```json" in template,
)
"""DeepSeek V3 and R1. Either reads what the other writes, too."""

DEEPSEEK_V31 = Notation(
    "deepseek_v31",
    fenced_objects,
    CallForm(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    markers=DEEPSEEK_MARKERS,
    is_in=_has("<｜tool▁sep｜>"),
)

PYTHONIC = Notation(
    "pythonic",
    python_calls(("<|python_start|>", "```tool_code"), ("<|python_end|>", "```")),
    CallForm("NAME(", ")", before="[", between=", ", after="]", arguments="python"),
    markers=("<|python_start|>", "<|python_end|>"),
    names=("llama4_pythonic",),
    is_in=_has("func_name1(", "```tool_code", "<|python_start|>"),
)
"""Gemma 3's and Llama 4's."""

GEMMA4 = Notation(
    "gemma4",
    gemma_calls("<|tool_call>", "<tool_call|>", '<|"|>'),
    CallForm("<|tool_call>call:NAME{", "}<tool_call|>", arguments="gemma"),
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    is_in=_has("<|tool_call>"),
)

JSON = Notation(
    "json",
    bare_json_objects(),
    CallForm(_OBJECT, "}", between="\n"),
)
"""Plain objects: for a call that is forced on a model with an unknown notation."""

NOTATIONS = (
    GLM45,
    QWEN3_CODER,
    MISTRAL_V11,
    MISTRAL,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    PHI4,
    GRANITE,
    LLAMA3,
    PYTHONIC,
    HERMES,
    GLM4,
    JSON,
)
"""In the order in which they are looked for in a template."""

BY_NAME = {name: notation for notation in NOTATIONS for name in (notation.name, *notation.names)}


def notation_in(templates: Iterable[str]) -> Notation | None:
    """The notation that the templates show."""
    texts = list(templates)
    return next((each for each in NOTATIONS if any(map(each.is_in, texts))), None)
