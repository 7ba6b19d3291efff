"""Chat templates of our own making in the notations of published families, short: what they write around the turns,
the calls and the reasoning is the family's."""

from __future__ import annotations

_TURNS = (
    "{%% for m in messages %%}{%% if m.role == 'assistant' %%}%(header)s"
    "{%% if m.reasoning_content %%}%(reasoning)s{%% endif %%}"
    "{%% if m.tool_calls %%}%(before)s{%% for c in m.tool_calls %%}{%% set f = c.function %%}"
    "{%% if not loop.first %%}%(between)s{%% endif %%}%(call)s{%% endfor %%}%(after)s{%% else %%}{{ m.content }}"
    "{%% endif %%}%(footer)s{%% else %%}<|turn|>{{ m.role }}\n{{ m.content }}%(end)s\n{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}%(header)s{%% endif %%}"
)


def template(
    call: str,
    *,
    before: str = "",
    between: str = "",
    after: str = "",
    reasoning: str = "<think>\n{{ m.reasoning_content }}\n</think>\n\n",
    header: str = "<|turn|>assistant\n",
    end: str = "<|end|>",
    footer: str = "<|end|>",
) -> str:
    """A template that lists the tools and writes calls and reasoning like this."""
    return "{% if tools %}Tools: {{ tools | tojson }}<|end|>{% endif %}" + _TURNS % {
        "call": call, "before": before, "between": between, "after": after, "reasoning": reasoning, "header": header,
        "end": end, "footer": footer,
    }  # fmt: skip


_ARGUMENTS = "{{ f.arguments | tojson }}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": ' + _ARGUMENTS + "}"
_EACH = "{%% for k, v in f.arguments.items() %%}%s{%% endfor %%}"
_VALUE = "{{ v if v is string else v | tojson }}"
_DSML = "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">" + _VALUE
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
)
_GEMMA = (
    '{% macro w(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{ {%- for k, x in v.items() -%}'
    "{{ k }}:{{ w(x) }}{{ ',' if not loop.last }}{%- endfor -%} }{% elif v is sequence %}[{% for x in v %}{{ w(x) }}"
    "{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)

FAMILIES: dict[str, tuple[str, str | None]] = {
    "hermes": (template(f"<tool_call>\n{_OBJECT}\n</tool_call>", between="\n"), "hermes"),
    "qwen3.5": (
        template(
            "<tool_call>\n<function={{ f.name }}>\n" + _EACH % f"<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>\n"
            + "</function>\n</tool_call>",
            between="\n",
        ),
        "qwen3_coder",
    ),
    "seed": (
        template(
            "<seed:tool_call>\n<function={{ f.name }}>\n" + _EACH % f"<parameter={{{{ k }}}}>{_VALUE}</parameter>\n"
            + "</function>\n</seed:tool_call>",
            between="\n",
            reasoning="<seed:think>{{ m.reasoning_content }}</seed:think>",
        ),
        None,
    ),
    "glm4.5": (
        template(
            "<tool_call>{{ f.name }}\n" + _EACH % f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n"
            + "</tool_call>",
            between="\n",
        ),
        "glm45",
    ),
    "glm4.7": (
        template(
            "<tool_call>{{ f.name }}" + _EACH % f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{_VALUE}</arg_value>"
            + "</tool_call>"
        ),
        "glm47",
    ),
    "minimax": (
        template(
            "<invoke name=\"{{ f.name }}\">\n" + _EACH % f"<parameter name=\"{{{{ k }}}}\">{_VALUE}</parameter>\n"
            + "</invoke>\n",
            before="<minimax:tool_call>\n", after="</minimax:tool_call>",
        ),
        None,
    ),
    "deepseek_v3.2": (
        template(
            "<｜DSML｜invoke name=\"{{ f.name }}\">\n" + _EACH % f"{_DSML}</｜DSML｜parameter>\n"
            + "</｜DSML｜invoke>\n",
            before="<｜DSML｜function_calls>\n", after="</｜DSML｜function_calls>",
        ),
        None,
    ),
    "deepseek_r1": (
        template(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n" + _ARGUMENTS
            + "\n```<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>", between="\n", after="<｜tool▁calls▁end｜>",
        ),
        "deepseek_v3",
    ),
    "deepseek_v3.1": (
        template(
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + _ARGUMENTS + "<｜tool▁call▁end｜>",
            before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
        ),
        "deepseek_v31",
    ),
    "kimi": (
        template(
            "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>" + _ARGUMENTS
            + "<|tool_call_end|>",
            before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>",
        ),
        None,
    ),
    "mistral": (
        template(
            _OBJECT[:-1] + ', "id": "{{ c.id }}"}', before="[TOOL_CALLS][", between=", ", after="]",
            reasoning="[THINK]{{ m.reasoning_content }}[/THINK]",
        ),
        "mistral",
    ),
    "mistral_v11": (template("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]" + _ARGUMENTS), "mistral_v11"),
    "nemotron": (template(_OBJECT, before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"), "nemotron_json"),
    "granite": (template(_OBJECT, before="<|tool_call|>[", between=", ", after="]"), "granite"),
    "cohere": (
        template(
            '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": ' + _ARGUMENTS + "}",
            before="<|START_ACTION|>[\n    ", between=",\n    ", after="\n]<|END_ACTION|>",
            reasoning="<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>",
        ),
        None,
    ),
    "apertus": (
        template(
            '{"{{ f.name }}": ' + _ARGUMENTS + "}", before="<|tools_prefix|>[", between=", ", after="]<|tools_suffix|>"
        ),
        None,
    ),
    "functionary": (template("<function={{ f.name }}>" + _ARGUMENTS + "</function>"), None),
    "lfm2": (template(_PYTHON, before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>"), "lfm2"),
    "gemma4": (
        _GEMMA
        + template(
            "<|tool_call>call:{{ f.name }}{ {%- for k, v in f.arguments.items() -%}{{ k }}:{{ w(v) }}"
            "{{ ',' if not loop.last }}{%- endfor -%} }<tool_call|>",
            reasoning="<|channel>thought\n{{ m.reasoning_content }}\n<channel|>",
            footer="{{ '<|tool_response>' if m.tool_calls else '<|end|>' }}",
        ),
        "gemma4",
    ),
}  # fmt: skip
"""A template, and the entry of the table of notations that is the same, if there is one."""
