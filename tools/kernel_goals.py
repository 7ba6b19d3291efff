"""The goals beside what a model of an H200 makes of them, with latencies: bands, and every number that they assume.

    python -m tools.kernel_goals [--product H200] [--into docs/kernels_report.md] [--measured FILE]

`kernel_costs/roofline.py` and `latencies.py` describe the model, `published.py` what it is held against. `--measured`
takes a report of `xserv bench kernels --output-json`, or gpu_check's, from a GPU; only the latter knows torch, and the
prefill's share.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

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
    parser.add_argument("--measured", type=Path, metavar="FILE", help="a report of bench kernels or of gpu_check")
    asked = parser.parse_args(arguments)
    model = model_of(asked.product)
    try:
        measured = rows_of(json.loads(asked.measured.read_text())) if asked.measured is not None else []
    except ValueError as error:
        parser.error(f"{asked.measured}: {error}")
    section = as_markdown(model, modelled(model), forecasts(), measured)
    print(section)
    if asked.into is not None:
        asked.into.write_text(filled(asked.into.read_text(), section))
    return 0


if __name__ == "__main__":
    sys.exit(main())
