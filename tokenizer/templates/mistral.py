"""Chat templates of Mistral's own formats, for folders that have a `tekken.json` and no template: what `mistral_common`
renders for the version of the file."""

from __future__ import annotations

from tokenizer.json_fields import Fields

VERSIONS = ("v3", "v7", "v11", "v13", "v15")

_CALLS = {
    "v3": (
        "[TOOL_CALLS][{%- for call in message.tool_calls -%}{{- {'name': call.function.name, 'arguments':"
        " call.function.arguments, 'id': call.id} | tojson -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}"
        "{%- endfor -%}]"
    ),
    "v11": (
        "{%- for call in message.tool_calls -%}[TOOL_CALLS]{{- call.function.name -}}{%- if call.id -%}[CALL_ID]"
        "{{- call.id -}}{%- endif -%}[ARGS]{{- call.function.arguments | tojson -}}{%- endfor -%}"
    ),
    "v13": (
        "{%- for call in message.tool_calls -%}[TOOL_CALLS]{{- call.function.name -}}[ARGS]"
        "{{- call.function.arguments | tojson -}}{%- endfor -%}"
    ),
}
_RESULTS = {
    "v3": (
        "[TOOL_RESULTS]{{- '{\"content\": ' -}}{%- if text.s[:1] in ['{', '['] -%}{{- text.s -}}{%- else -%}"
        "{{- text.s | tojson -}}{%- endif -%}{{- ', \"call_id\": ' -}}{{- message.tool_call_id | tojson -}}{{- '}' -}}"
        "[/TOOL_RESULTS]"
    ),
    "v7": "[TOOL_RESULTS]{{- message.tool_call_id -}}[TOOL_CONTENT]{{- text.s -}}[/TOOL_RESULTS]",
    "v13": "[TOOL_RESULTS]{{- text.s -}}[/TOOL_RESULTS]",
}
_TOOLS = (
    "[AVAILABLE_TOOLS][{%- for tool in tools -%}{{- {'type': 'function', 'function': {'name': tool.function.name,"
    " 'description': tool.function.description | default(''), 'parameters': tool.function.parameters | default({})}}"
    " | tojson -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}][/AVAILABLE_TOOLS]"
)
_TEXT = (  # of a message, as text.s; a picture after texts comes first
    "{%- set text = namespace(s='') -%}{%- if message.content is string -%}{%- set text.s = message.content -%}"
    "{%- elif message.content -%}{%- for part in message.content -%}{%- if part.type == 'text' -%}"
    "{%- set text.s = text.s + part.text -%}{%- elif part.type in ['image', 'image_url'] -%}"
    "{%- set rest = message.content[:-1] | map(attribute='type') | unique | list -%}"
    "{%- if loop.last and rest == ['text'] -%}{%- set text.s = '[IMG]' + text.s -%}{%- else -%}"
    "{%- set text.s = text.s + '[IMG]' -%}{%- endif -%}{%- else -%}"
    "{{- raise_exception('content may have parts of type text and image, found ' + part.type) -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
)


def mistral_template(fields: Fields) -> str | None:
    """The template for a `tekken.json`; None for a version that is not known."""
    config = fields.optional_object("config")
    version = None if config is None else config.get("version")
    if version not in VERSIONS:
        return None
    is_new = version in ("v13", "v15")
    calls = _CALLS["v13" if is_new else "v11" if version == "v11" else "v3"]
    results = _RESULTS["v13" if is_new else "v3" if version == "v3" else "v7"]
    place = "loop.index0 == users.first" if is_new else "loop.index0 == users.last"
    system = (
        "{%- set system.s = system.s + text.s + '\\n\\n' -%}" if version == "v3"
        else "[SYSTEM_PROMPT]{{- text.s -}}[/SYSTEM_PROMPT]"
    )  # fmt: skip
    return (
        "{{- bos_token -}}{%- set users = namespace(first=-1, last=-1) -%}{%- set system = namespace(s='') -%}"
        "{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set users.last = loop.index0 -%}"
        "{%- if users.first < 0 -%}{%- set users.first = loop.index0 -%}{%- endif -%}{%- endif -%}{%- endfor -%}"
        f"{{%- for message in messages -%}}{_TEXT}"
        f"{{%- if message.role in ['system', 'developer'] -%}}{system}{{%- elif message.role == 'user' -%}}"
        f"{{%- if tools and {place} -%}}{_TOOLS}{{%- endif -%}}[INST]"
        "{%- if loop.index0 == users.last -%}{{- system.s -}}{%- endif -%}{{- text.s -}}[/INST]"
        "{%- elif message.role == 'assistant' -%}"
        "{%- if not text.s and not message.tool_calls -%}"
        "{{- raise_exception('an answer must have content or tool calls') -}}{%- endif -%}"
        "{%- generation -%}{{- text.s.rstrip(' ') -}}"
        f"{{%- if message.tool_calls -%}}{calls}{{%- endif -%}}{{{{- eos_token -}}}}{{%- endgeneration -%}}"
        f"{{%- elif message.role == 'tool' -%}}{results}{{%- else -%}}"
        "{{- raise_exception('roles are system, user, assistant and tool, found ' + message.role) -}}"
        "{%- endif -%}{%- endfor -%}"
    )
