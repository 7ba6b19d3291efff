"""Writes the ids that transformers' AutoTokenizer gives for small tokenizer folders of each class.

    python -m tools.references.make_tokenizer_classes     # needs transformers

The folders are those of `tests/tokenizer/class_cases.py`; cases with the same ids are grouped.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from transformers import AutoTokenizer, __version__

from tests.tokenizer.class_cases import EXPECTED, TEXTS, cases


def main() -> None:
    names_by_ids: dict[str, list[str]] = {}
    for name, files in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            for file, text in files.items():
                (Path(folder) / file).write_text(text, encoding="utf-8")
            tokenizer = AutoTokenizer.from_pretrained(folder)
            ids = [tokenizer(text)["input_ids"] for text in TEXTS]
        names_by_ids.setdefault(json.dumps(ids), []).append(name)
    found = {"transformers": __version__, "ids": dict(sorted(names_by_ids.items()))}
    EXPECTED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
