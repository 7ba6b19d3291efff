"""The goals beside what a model of an H200 makes of them, with latencies: bands, and every number that they assume.

    python -m tools.kernel_goals [--product H200] [--into docs/kernels_report.md] [--measured FILE ...]

`kernel_costs/roofline.py` and `latencies.py` describe the model, `published.py` what it is held against. `--measured`
takes reports of `xserv bench kernels --output-json`, or gpu_check's, from a GPU; only the latter know torch, the
prefill's share, and a model's steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from runtime.device.emulator.driver.architectures import model_of  # noqa: E402
from tools.kernel_costs.forecast import forecasts, modelled  # noqa: E402
from tools.kernel_costs.goals import as_markdown, filled, rows_of  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", default="H200", help="of sm_90a: H100 or H200")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a page whose section is made anew")
    parser.add_argument(
        "--measured", type=Path, nargs="+", default=[], metavar="FILE",
        help="reports of bench kernels or of gpu_check; a later one's goals take the place of an earlier one's",
    )  # fmt: skip
    asked = parser.parse_args(arguments)
    model = model_of(asked.product)
    measured: list[dict[str, Any]] = []
    for file in asked.measured:
        try:
            rows = [
                row for row in rows_of(json.loads(file.read_text(encoding="utf-8"))) if row.get("value") is not None
            ]
        except ValueError as error:
            parser.error(f"{file}: {error}")
        anew = {row["goal"] for row in rows}
        measured = [row for row in measured if row["goal"] not in anew] + rows
    section = as_markdown(model, modelled(model), forecasts(), measured)
    print(section)
    if asked.into is not None:
        asked.into.write_text(filled(asked.into.read_text(encoding="utf-8"), section), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
