"""Makes docs/python.md, the page of the Python API, from the docstrings of `xserv`'s exports.

    python -m tools.make_python_page

A test compares the page with the docstrings.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import xserv

from runtime.engine.config import EngineConfig
from runtime.llm import async_llm, llm
from runtime.llm.loaded_model import LoadedModel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "python.md"

HEAD = """# Python

What `import xserv` gives, by vLLM's names where it has one. An unknown keyword raises `UnknownOptionError`, a
`TypeError`, with the nearest one; a wrong value `RequestError`, a `ValueError` that names it. Calls that compute also
raise `ContextLengthExceededError`, `EmbeddingError` and `EngineDeadError`. `python -m tools.make_python_page` makes the
page of the docstrings.

"""

RAISED = re.compile(
    r"\s*Raises (?:`(?:RequestError|ContextLengthExceededError|EmbeddingError|EngineDeadError)`(?:,\s)?)+\."
)
"""The end of a method's docstring that says no more than the head of the page."""

EXAMPLES = """
A prompt is a text, its token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps `cache_salt`,
`priority`, `ttft_target_s` and `tpot_target_s`. Chats, choices, forbidden words, vectors, and beams:

```python
from xserv import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams

with LLM() as llm:
    messages = [{"role": "user", "content": "Reverse the word planet"}]
    print(llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=20))[0].outputs[0].text)
    color = StructuredOutputsParams(choice=["red", "green", "blue"])
    print(llm.generate("My favourite colour is", SamplingParams(structured_outputs=color))[0].outputs[0].text)
    print(llm.generate("Once", SamplingParams(bad_words=["upon"], max_tokens=8))[0].outputs[0].text)
    print(len(llm.embed("some text")[0].outputs.embedding))
    for beam in llm.beam_search("17 plus 25 is", BeamSearchParams(beam_width=3, max_tokens=4))[0].sequences:
        print(round(beam.cum_logprob, 3), repr(beam.text))
```
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Examples\n", _example(llm), EXAMPLES, "\nFor programs on asyncio:\n", _example(async_llm), ""]
    for name in xserv.__all__:
        parts += _class(name, getattr(xserv, name))
    parts += ["## Settings of the engine\n", "Keyword arguments of `LLM` and `AsyncLLM`.\n", _described(EngineConfig)]
    return "\n".join(parts).rstrip() + "\n"


def _class(name: str, cls: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if inspect.isfunction(cls):
        yield _signature(name, cls, is_method=False) + "\n"
        yield _markdown(inspect.getdoc(cls) or "")
        return
    if cls is llm.LLM:
        yield _signature(name, cls.__init__) + "\n"
        yield _markdown((inspect.getdoc(LoadedModel) or "").replace("settings   ", "**settings  "))
        yield _markdown(inspect.getdoc(cls) or "")
    elif issubclass(cls, LoadedModel):
        common = ", ".join(f"`{method}`" for method, _ in _methods(LoadedModel))
        yield f"The arguments are `LLM`'s, and so are {common}.\n"
        yield _markdown(inspect.getdoc(cls) or "")
    elif issubclass(cls, enum.Enum):
        yield _markdown(inspect.getdoc(cls) or "")
        yield ", ".join(f"`{each.name}`" for each in cls) + "\n"
        return
    else:
        yield _described(cls)
    for method, function in _methods(cls, but_for=LoadedModel.__mro__ if cls is not llm.LLM else ()):
        yield f"### {name}.{method}\n"
        if not isinstance(function, property):
            yield _signature(method, function) + "\n"
        yield RAISED.sub("", _markdown(inspect.getdoc(function) or "")).rstrip() + "\n"


def _methods(cls: type, but_for: Sequence[type] = ()) -> Iterator[tuple[str, Any]]:
    """The public methods of a class, and of our classes that it extends unless they are left out."""
    for owner in cls.__mro__[:-1]:
        if owner not in but_for and owner.__module__.startswith(("runtime.llm", "runtime.engine.grammar")):
            for name, value in vars(owner).items():
                if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    yield name, value


def _signature(name: str, function: Any, *, is_method: bool = True) -> str:
    parts = []
    is_keyword_only = False
    for parameter in list(inspect.signature(function).parameters.values())[is_method:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            parts.append("*")
        mark = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        said = isinstance(parameter.default, (bool, int, float, str)) and "Literal" not in parameter.annotation
        annotation = str(parameter.annotation)
        if parameter.default is None:
            annotation = annotation.removesuffix(" | None")
        typed = default.replace(" ", "") if said else f": {annotation}{default}"
        parts.append(f"{mark}{parameter.name}{typed}")
    returned = inspect.signature(function).return_annotation
    head = "async def " if inspect.iscoroutinefunction(inspect.unwrap(function)) else ""
    tail = "" if name[0].isupper() else f" -> {returned}"
    line = f"{head}{name}({', '.join(parts)}){tail}"
    if len(line) > 110:
        line = f"{head}{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){tail}"
    return f"```python\n{line}\n```"


def _described(cls: type) -> str:
    """A class's docstring, after the fields that it does not describe; each field with its default."""
    if dataclasses.is_dataclass(cls):
        fields = [(each.name, each.default, each.default is dataclasses.MISSING) for each in dataclasses.fields(cls)]
    elif issubclass(cls, msgspec.Struct):
        fields = [(each.name, each.default, each.required) for each in msgspec.structs.fields(cls)]
    else:
        return _markdown(inspect.getdoc(cls) or "")
    shown = {name: name if is_required else f"{name}={_value(value)}" for name, value, is_required in fields}
    doc = _markdown(inspect.getdoc(cls) or "", shown)
    described = set(re.findall(r"\w+", " ".join(re.findall(r"^- `([^`]+)`:", doc, re.M))))
    others = [text for name, text in shown.items() if name not in described]
    if not others:
        return doc
    if described:
        others.append("...")
    text = textwrap.fill(", ".join(others), 108, break_long_words=False)
    return f"```python\n{cls.__name__}({text})\n```\n\n{doc}"


def _value(value: object) -> str:
    return str(value) if isinstance(value, enum.Enum) else repr(value)


def _example(module: Any) -> str:
    """The block of code in a module's docstring, which Python 3.13 indents differently."""
    text = ast.get_docstring(ast.parse(inspect.getsource(module)), clean=False)
    found = [each for each in re.findall(r"(?:^    .*\n|^\n)+", f"{text}\n", re.M) if "import" in each]
    return f"```python\n{textwrap.dedent(found[0]).strip()}\n```\n"


def _markdown(doc: str, shown_as: Mapping[str, str] = MappingProxyType({})) -> str:
    """A docstring as Markdown: lines of a name and its meaning become a list, indented blocks become code."""
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", doc.strip("\n")):
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines):
            parts.append("```text\n" + textwrap.dedent(paragraph) + "\n```")
            continue
        shown: list[str] = []
        for line in lines:
            entry = re.match(r"^(\*{0,2}[a-z_]\w*(?:, \w+)*)\s{2,}(\S.*)$", line)
            if entry is not None:
                names = ", ".join(shown_as.get(name, name) for name in entry[1].split(", "))
                shown.append(f"- `{names}`: {entry[2]}")
            elif shown and shown[-1].startswith("- ") and line.startswith(" "):
                shown[-1] += f" {line.strip()}"
            else:
                shown.append(line)
        if any(line.startswith("- ") for line in shown) and not shown[0].startswith("- "):
            first = next(place for place, line in enumerate(shown) if line.startswith("- "))
            shown.insert(first, "")
        parts.append("\n".join(shown))
    return "\n\n".join(parts).replace("``", "`") + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
