"""Writes what transformers' parser makes of random answers to the tests' response templates.

    python -m tools.references.make_response_goldens [--seed 1] [--count 60] [--output FILE]     # needs transformers

Of each answer the regions that it closes are kept: the field and its value; or null if it raises an error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import __version__
from transformers.utils.chat_parsing.response_parser import ResponseParser

from tests.runtime.text.response_template.cases import GOLDENS, TEMPLATES, TOOLS, answers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--output", type=Path, default=GOLDENS)
    given = parser.parse_args()
    cases = [{**case, "regions": regions_of(case)} for case in answers(given.seed, given.count)]
    found = {"transformers": __version__, "seed": given.seed, "count": given.count, "cases": cases}
    given.output.write_text(json.dumps(found, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def regions_of(case: dict[str, Any]) -> list[list[Any]] | None:
    tools = TOOLS if case["tools"] else None
    try:
        parser = ResponseParser(TEMPLATES[case["template"]], prefix=case["prompt"], tools=tools)
        events = [*parser.initial_events, *parser.feed(case["text"]), *parser.finalize()[1]]
    except ValueError:
        return None
    return [[event["field"], event["value"]] for event in events if event["type"] == "region_close"]


if __name__ == "__main__":
    main()
