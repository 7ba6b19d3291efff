"""Checks and measures this engine on a GPU, in commands of at most nine minutes, each continuing the previous one.

    python -m tools.gpu_check --bundle gpu_bundle --out results                       # cuda:0
    python -m tools.gpu_check --bundle gpu_bundle --out results --earlier results     # continues; three are enough
    python -m tools.gpu_check --bundle gpu_bundle --jobs 12    # untimed sections in parallel, then the rest
    python -m tools.gpu_check --device emulated:sm_90a --quick                        # tries the check itself

`tools/gpu_bundle.py` makes the bundle beforehand, on a machine with compiler and network: all kernels, and packages
that the machine may lack. Without it kernels are compiled on first use, by Python's packages or the CUDA toolkit whose
nvcc is on the PATH. If torch is installed, it is a peer, and gives the timeline of a graph.

Each section is a family of cases in a process of its own. A case's result is written at once (`gpu/report.py`), so that
a hang, a fault or the time limit costs only the current case. `--earlier` names the results of a previous run; its
cases are not run again, failed ones only with `--retry`. The exit status is 1 if a case failed, 2 for a wrong command
line. `--changed-since` names the bundle of a previous run: cases all of whose kernels it has are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.gpu.checking.changed import Unchanged, unchanged_since  # noqa: E402
from tools.gpu.checking.report import Report  # noqa: E402
from tools.gpu.checking.runner import LEAST_S, Launcher, run_section  # noqa: E402
from tools.gpu.checking.unpack import prepare  # noqa: E402
from tools.gpu.sections import Options, Section, sections  # noqa: E402

BUDGET_S = 540.0
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = _parser()
    asked = parser.parse_args(arguments)
    names = [section.name for section in sections()]
    if asked.jobs < 1:
        parser.error(f"--jobs {asked.jobs} is not at least 1")
    if unknown := [name for name in asked.sections or () if name not in names]:
        parser.error(f"--sections {unknown[0]!r} is none of {', '.join(names)}")
    if asked.changed_since is not None and asked.bundle is None:
        parser.error("--changed-since compares with --bundle, which is missing")
    options = Options(asked.device, asked.quick)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        try:
            alone = Launcher(prepare(asked.bundle, Path(scratch)))
            threads = str(max(1, (os.cpu_count() or 1) // asked.jobs))
            beside_others = Launcher({**alone.environment, **dict.fromkeys(THREADS, threads)})
            report = Report(asked.out, options, asked.earlier)
            unchanged = unchanged_since(asked.changed_since, asked.bundle) if asked.changed_since else Unchanged()
        except (OSError, ValueError) as error:
            parser.error(str(error))
        if asked.retry:
            report.forget_errors()
        wanted = [section for section in sections() if not asked.sections or section.name in asked.sections]
        wanted = [section for section in wanted if not report.is_done(section.name)]
        for name in [section.name for section in wanted if section.name in unchanged.sections]:
            report.add(name, {"status": "skipped", "why": "no kernel has changed", "seconds": 0.0, "cases": {}})
        wanted = [section for section in wanted if section.name not in unchanged.sections]

        def run(section: Section) -> None:
            left_s = asked.budget - (time.monotonic() - began)
            if left_s < LEAST_S:
                print(f"{section.name}: no time is left: run it again with --earlier", flush=True)
                return
            launcher = alone if section.is_timed or asked.jobs == 1 else beside_others
            earlier = report.outcomes.get(section.name)
            found = run_section(
                section,
                options,
                launcher,
                left_s,
                earlier,
                lambda outcome: report.add(section.name, outcome),
                unchanged.cases.get(section.name, ()),
            )
            print(f"{section.name}: {found['status']}, {found['seconds']} s  {found.get('why', '')}", flush=True)

        with ThreadPoolExecutor(asked.jobs) as pool:
            if asked.jobs > 1:
                list(pool.map(run, [section for section in wanted if not section.is_timed]))
                wanted = [section for section in wanted if section.is_timed]
        for section in wanted:
            run(section)
    failed = [
        f"{name}, {case}: {found['error'].splitlines()[0]}"
        for name, outcome in report.outcomes.items() for case, found in outcome["cases"].items() if "error" in found
    ]  # fmt: skip
    print("\n".join(failed))
    return int(bool(failed) or any("why" in each and each["status"] != "skipped" for each in report.outcomes.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or emulated:sm_90a to try the check itself")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="what tools/gpu_bundle.py made")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), metavar="FOLDER", help="for the results")
    parser.add_argument("--earlier", type=Path, metavar="FOLDER", help="results to go on with; may be the same")
    parser.add_argument("--changed-since", type=Path, metavar="BUNDLE", help="leave out cases whose kernels it has")
    parser.add_argument("--retry", action="store_true", help="run the cases again that failed")
    parser.add_argument("--sections", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="so many untimed sections at once, then the timed")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for this command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
