"""The form in which a template takes content and calls, found by rendering marks. The small templates are of the kinds
that published models have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tokenizer.support import SHARED
from tokenizer.templates.template_forms import TemplateForms

ROLES = ("system", "user", "assistant", "tool")
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}

LLAVA = (  # llava-1.5's and llava-next's: parts alone, pictures in front
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
JSON = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}"
EITHER = (  # Qwen2.5-VL's
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' or 'image_url' in c %}<|v|><|pad|><|/v|>"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
EITHER_OR_NOTHING = EITHER.replace("<|v|><|pad|><|/v|>", " ")  # Gemma 4's of the system
EITHER_OR_AS_JSON = EITHER.replace("<|v|><|pad|><|/v|>", "{{ c | tojson }}")  # MiniMax M2's of tools, which prints it
FIRST_PART = (  # Gemma 3's system message
    "{% if messages[0].role == 'system' %}{% if messages[0].content is string %}{{ messages[0].content }}"
    "{% else %}{{ messages[0].content[0].text }}{% endif %}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
OLD_PIXTRAL = (  # a text's field is "content"
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.content }}{% elif c.type == 'image_url' %}[IMG]{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role", "text", "parts", "one_part", "has_picture"),
    [
        *((LLAVA, role, False, True, True, True) for role in ROLES),
        *((template, role, True, False, False, False) for template in (STRINGS, TRIMMED, JSON) for role in ROLES),
        *((EITHER, role, True, True, True, True) for role in ROLES),
        (FIRST_PART, "system", True, False, True, False),
        (FIRST_PART, "user", True, False, False, False),
        (OLD_PIXTRAL, "user", True, True, True, True),
        (EITHER_OR_NOTHING, "user", True, True, True, False),
        (EITHER_OR_AS_JSON, "user", True, True, True, False),
        (EITHER_OR_AS_JSON.replace(" | tojson", ""), "user", True, True, True, False),
    ],
)
def test_content(template: str, role: str, text: bool, parts: bool, one_part: bool, has_picture: bool) -> None:
    form = TemplateForms(template, VARIABLES, has_tools=False).content(role)
    assert (form.text, form.parts, form.one_part, form.picture is not None) == (text, parts, one_part, has_picture)
    assert form.fields == (("text", "content") if template == OLD_PIXTRAL else ("text",))


@pytest.mark.parametrize(
    ("template", "text"),
    [(LLAVA, "<image>\n"), (EITHER, "<|v|><|pad|><|/v|>"), (OLD_PIXTRAL, "[IMG]"), (STRINGS, None)],
)
def test_what_a_picture_is_in_the_text(template: str, text: str | None) -> None:
    assert TemplateForms(template, VARIABLES, has_tools=False).picture_text == text


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{ARGUMENTS}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("written", "takes"),
    [
        ("{{ c.function.arguments | tojson }}", (True, False)),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", (True, False)),
        ("{{ '<' + c.function.arguments + '>' }}", (False, True)),  # DeepSeek V3's
        ("{{ c.function.arguments }}", (False, True)),  # of a mapping, Python's text
        ("{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}", (True, True)),  # Qwen3's
        ("{{ c.function.name }}", (False, False)),
    ],
)
def test_arguments(written: str, takes: tuple[bool, bool]) -> None:
    template = CALLS.replace("{ARGUMENTS}", written)
    assert TemplateForms(template, VARIABLES, has_tools=False).arguments == takes


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("path", sorted((SHARED / "chat_templates").glob("*.jinja")), ids=lambda path: path.stem[:24])
def test_published_templates(path: Path, has_tools: bool) -> None:
    """Those of models that read text take strings; what they refuse or leave out, they say themselves."""
    template = path.read_text(encoding="utf-8")
    forms = TemplateForms(template, VARIABLES, has_tools=has_tools)
    for role in ROLES:
        is_refused = role in ("system", "tool") and "System role not supported" in template
        assert forms.content(role)[:3] == (not is_refused, False, False), role
    assert forms.arguments[0] is ("tool_calls" in template)
