"""Objects that keep their text: any JSON is read as `json` reads it, and written as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer.templates.chat_template import render_chat
from tokenizer.templates.written_json import dumps, equal, text_of, written_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.text(), VALUES)


@given(OBJECTS, st.sampled_from([None, 0, 2]), st.booleans())
def test_an_object_is_read_and_written_as_it_was(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    kept = written_object(text)
    assert equal(dict(kept), value)
    assert dumps(kept) == text
    assert dumps({"name": "f", "arguments": kept}) == f'{{"name": "f", "arguments": {text}}}'
    for item in kept.values():
        if isinstance(item, (dict, list)):
            assert json.loads(text_of(item) or "") == item


@given(st.text(alphabet='{}[]":,1a \\nul', max_size=12))
def test_other_texts_are_refused_as_json_refuses_them(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        assert dict(written_object(text)) == value
    else:
        with pytest.raises(ValueError, match=r"[a-z]"):
            written_object(text)


def test_a_template_sees_a_dictionary_and_writes_its_text() -> None:
    text = '{"a":[1,2],"b" : {"c":1.50}, "_written":0}'
    call = {"function": {"name": "f", "arguments": written_object(text)}}

    def rendered(template: str) -> str:
        return render_chat(template, [{"role": "assistant", "content": "", "tool_calls": [call]}])

    within = "{% for call in messages[0].tool_calls %}{% set f = call.function %}{% set a = f.arguments %}"
    assert rendered(within + "{{ a | tojson }}{% endfor %}") == text
    assert rendered(within + "{{ f | tojson }}{% endfor %}") == f'{{"name": "f", "arguments": {text}}}'
    assert rendered(within + "{% for k, v in a.items() %}{{ k }}={{ v | tojson }};{% endfor %}{% endfor %}") == (
        'a=[1,2];b={"c":1.50};_written=0;'
    )
    assert rendered(within + "{{ a is mapping }}{{ a.b.c }}{{ a._written }}{% endfor %}") == "True1.5"
