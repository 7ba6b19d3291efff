"""Loads one tokenizer in a process of its own and prints what that took: a script, run by `bench tokenizer`.

    python -m runtime.bench.tokenizers.load ours FOLDER/tokenizer.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def _resident_bytes() -> int:
    """What the process holds in memory and shares with nobody, where the system tells (Linux); else 0."""
    smaps = Path("/proc/self/smaps_rollup")
    if not smaps.exists():
        return 0
    fields = dict(line.split(":", 1) for line in smaps.read_text(encoding="utf-8").splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) * 1024


def main() -> None:
    """Load, encode a word, report."""
    name, file = sys.argv[1], Path(sys.argv[2])
    before = _resident_bytes()
    start = time.perf_counter()
    from runtime.bench.tokenizers.sides import LOADERS

    side = LOADERS[name](file)
    loaded = time.perf_counter()
    ids = [] if side is None else list(side.encode("Hello, world!"))
    report = {
        "load_s": loaded - start,
        "first_encode_s": time.perf_counter() - loaded,
        "private_bytes": _resident_bytes() - before,
        "num_ids": len(ids),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
