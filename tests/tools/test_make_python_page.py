"""docs/python.md is what its tool makes of the docstrings, and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import xserv

from tools.make_python_page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tools.make_python_page makes it again"


def test_the_page_holds_every_name_and_leaves_nothing_unsaid() -> None:
    text = page()
    for name in xserv.__all__:
        assert f"\n## {name}\n" in text
    for name in ("LLM.generate", "LLM.beam_search", "LLM.get_tokenizer", "AsyncLLM.generate", "AsyncLLM.abort"):
        (body,) = re.findall(rf"^### {name}\n(.*?)(?=^##)", text, re.S | re.M)
        assert len(body.split("```")[2].split()) > 3, name
    assert "``" not in text.replace("```", "")


def test_the_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    examples = [block for block in blocks if "from xserv import" in block]
    assert len(examples) == 3
    script = "\n".join(f"{block}\nprint('--')" for block in examples)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("compiling for this processor")]
    assert (done.returncode, said) == (0, []), done.stderr  # an empty cache of kernels shows how far it is
    assert [bool(part.strip()) for part in done.stdout.split("--\n")] == [True, True, True, False]
