"""A golden model with the tiles that `XSERV_CPU_TILES` forces: `python -m tests.models.forced_tiles F32-int8 ...`.

Each argument is a type of the weights and a quantization. On stdout one JSON object: `tiles`, the kind in force, and
`errors`, of logits to the golden's largest. The prompt is fed at once, and again with its last six tokens one by one;
the greater error counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from models.registry import load_model
from numba_kernels.cpu.target import TILES
from runtime.dtype import float32
from tests.models.driver import logits_of, relative_error
from tests.models.folders import load_golden, write_model

CASE = "qwen3_tied_gqa4"


def error_of(stored_as: str, quantization: str, folder: Path) -> float:
    """With float32 pages, so that the weights' numbers are all there is to an error."""
    golden = load_golden(CASE)
    model = load_model(write_model(folder, golden, stored_as), quantization=quantization)
    expected = golden.logits["float32" if stored_as == "F32" else "bfloat16"]
    ids = golden.prompt_ids
    cuts = [len(ids)], [len(ids) - 6, *[1] * 6]
    return max(relative_error(logits_of(model, ids, cut, kv_dtype=float32), expected) for cut in cuts)


def main() -> None:
    errors = {}
    for numbers in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            errors[numbers] = error_of(*numbers.split("-"), Path(folder))
    json.dump({"tiles": TILES, "errors": errors}, sys.stdout)


if __name__ == "__main__":
    main()
