"""Response templates in the style of published ones, and random answers to them, of which transformers' results are
kept (tools/references/make_response_goldens.py)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

GOLDENS = Path(__file__).with_name("goldens.json")

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

TEMPLATES: dict[str, dict[str, Any]] = {
    "objects": {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
        },
    },
    "elements": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True, "content": "xml-inline", "transform": _CALL,
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            },
            "content": {"close": "<|im_end|>"},
        },
    },
    "braces": {
        "start_anchor": ["<|turn>model\n", "<tool_response|>"],
        "fields": {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
                "content": "json", "transform": _CALL,
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            },
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
        },
    },
    "messages": {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {
                "open_pattern": r"<\|channel\|>analysis<\|message\|>", "close": ["<|end|>", "<|return|>", "<|call|>"],
                "repeats": True, "join": "\n\n",
            },
            "tool_calls": {
                "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+)\s*(?:<\|constrain\|>json)?"
                r"<\|message\|>",
                "close": "<|call|>", "content": "json", "repeats": True, "transform": _CALL,
            },
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
                "close_pattern": r"<\|end\|>|<\|return\|>|\Z",
            },
        },
    },
    "python": {
        "start_anchor_pattern": r"<\|im_start\|>assistant\s*",
        "fields": {
            "tool_calls": {
                "open": "<|tool_call_start|>", "close": "<|tool_call_end|>", "content": "python-call-list",
                "transform_each": True, "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            },
            "content": {"close": "<|im_end|>"},
        },
    },
    "pairs": {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": ["<think>", "<think>\n"], "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"<tool_call>(?P<name>[\w.-]+)\s*", "close": "</tool_call>", "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}}, "merge_duplicates": True,
                },
                "repeats": True, "transform": _CALL,
            },
            "content": {"content_args": {"strip": False}},
        },
    },
    "lines": {
        "start_anchor": "A:",
        "fields": {
            "tool_calls": {
                "open_pattern": r"Call (?P<name>\w{1,8})\b:?\n", "close": "\n\n", "content": "kv-lines",
                "content_args": {"kv_sep": "=", "value_parser": {"name": "text"}}, "repeats": True, "transform": _CALL,
            },
            "thinking": {"open": "(", "close": ")", "repeats": True},
            "content": {},
        },
    },
}  # fmt: skip

_TYPES: dict[str, Any] = {
    "a": {"type": "integer"}, "b": {"type": ["number", "null"]},
    "c": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
    "d": {"type": "array"}, "k": {"type": "object", "nullable": True},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": _TYPES}}}]

_ANY = ("Hello", " world", "\n", " ", "\n\n", "é😀", "<", ">", "</", "f", "g", "a", "b", "1", " 2.0", "true", "null",
        '"', "{", "}", "[", "]", ",", ":", "=", "\x01", "\\")  # fmt: skip
_OF: dict[str, tuple[str, ...]] = {
    "objects": (
        "<think>", "</think>", "<tool_call>", "</tool_call>", '\n{"name": "f", "arguments": {"a": "7", "c": "True"}}\n',
        '{"name": "g", "arguments": {}}', "<|im_end|>", "<|endoftext|>",
        '<tool_call>\n{"name": "f", "arguments": {"b": "1.5"}}\n</tool_call>',
    ),
    "elements": (
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_call>\n<function=f>", "<parameter=a>",
        "<parameter=c>\n", "\n</parameter>", "</parameter>", "\n</function>\n</tool_call>", "<|im_end|>",
        "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n<parameter=k>\n{}\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "braces": (
        "<|channel>thought\n", "<channel|>", "<|tool_call>call:f{", 'a:<|"|>x{<|"|>', "a:1", "b:[1,2]", "}<tool_call|>",
        "<tool_call|>", "<turn|>", "<|tool_response>", '<|"|>',
        '<|tool_call>call:f{a:<|"|>q"<|"|>,k:{z:None}}<tool_call|>',
        '<|tool_call>call:f{"a:b":1,c:"x{y:1}"}<tool_call|>',
    ),
    "messages": (
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|end|>", "<|call|>", "<|return|>",
        "<|start|>assistant", '{"a": 1}', '{"c": "true"}',
    ),
    "python": (
        "<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>", "[f(a=1, b='x')]",
        "<|tool_call_start|>[f(a='7', d=[1, {'q': None}]), g()]<|tool_call_end|>", "f(", "a=", ")",
    ),
    "pairs": (
        "<think>", "<think>\n", "</think>", "<tool_call>f\n", "</tool_call>", "<arg_key>a</arg_key>",
        "\n<arg_value>7</arg_value>", "<arg_key>c</arg_key><arg_value>x y</arg_value>\n",
        "<arg_key>a</arg_key><arg_value>[1]</arg_value>",
    ),
    "lines": ("Call f:\n", "Call f", "a=1\n", "b = 2\n", "(", ")", "Call toolongname\n"),
}  # fmt: skip
_PROMPTS: dict[str, tuple[str, ...]] = {
    "objects": ("", "<|im_start|>assistant\n", "x<think><|im_start|>assistant\n<think>\n",
                "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    "elements": ("", "<|im_start|>assistant\n<think>\n"),
    "braces": ("", "<|turn>model\n", "<|turn>model\n<|channel>thought\n"),
    "messages": ("", "<|start|>assistant"),
    "python": ("", "<|im_start|>assistant\n"),
    "pairs": ("", "<|assistant|>", "<|assistant|><think>"),
    "lines": ("", "A:"),
}  # fmt: skip


def answers(seed: int, count: int) -> list[dict[str, Any]]:
    """So many answers of each template, with the prompt's end, and whether tools are given."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    for name in TEMPLATES:
        pieces = _OF[name] * 2 + _ANY
        for _ in range(count):
            text = "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 9)))
            found.append(
                {"template": name, "prompt": draw.choice(_PROMPTS[name]), "text": text, "tools": draw.random() < 0.5}
            )
    return found
