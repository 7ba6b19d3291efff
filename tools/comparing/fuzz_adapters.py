"""Runs random adapters of random small models and compares each with PEFT.

    python tools/comparing/fuzz_adapters.py --peer-python PYTHON [--seed N] [--num M] [--family qwen3 ...]
    python tools/comparing/fuzz_adapters.py --peer-python PYTHON --case FILE
    python tools/comparing/fuzz_adapters.py --peer-python PYTHON --num 12 --write-goldens tests/models/fuzzed_adapters

`PYTHON` has torch, transformers and peft (`fuzzing/adapter_oracle.py` runs there). Case `i` of seed `N` is always the
same model with the same adapters (`fuzzing/adapter_cases.py`): two of any rank up to 64, of maps, experts, tables and
heads. The model's weights are floats, GPTQ's, AWQ's, FP8 or a type of GGUF; PEFT then adapts the floats that they
mean. It compares, on the cpu in two engines and on an emulated device in one,

- the prompts' logits with each adapter and without, in one batch: max|a - b| / max|b| within 2e-5 in float32 and 2e-2
  in bfloat16 and float16, or three times PEFT's own error in that type; where products read codes, and round rows, the
  root of the squares' mean within 0.1;
- the same rows alone: the same bits, if the arithmetic is deterministic (cpu, or exact);
- greedy answers of an engine with fewer slots than adapters, alone and together: the same bits, and the first token's
  log probability by the logits above.

The exit status is 1 if there was any failure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.comparing.fuzz_models import HANG_S, MOST_DRAWS, Checker, Oracle, run  # noqa: E402
from tools.comparing.fuzzing.adapter_cases import FAMILIES, WITH_CODES, draw_adapters, draw_stored  # noqa: E402
from tools.comparing.fuzzing.cases import Case, classes_of  # noqa: E402
from tools.comparing.fuzzing.check_adapters import check_adapters  # noqa: E402
from tools.comparing.fuzzing.stored_models import store  # noqa: E402

ORACLE = ROOT / "tools" / "comparing" / "fuzzing" / "adapter_oracle.py"
NUM_ADAPTERS = 2
MOST_NOISE = 0.03
"""The largest error of PEFT's own in a type of 16 bits in which a model is compared."""
MOST_NOISE_IN_FLOAT32 = 5e-6
"""The largest in float32. With more, rounding alone may move logits by the bound: other adapters are drawn."""


class AdapterOracle(Oracle):
    """PEFT beside it."""

    def __init__(self, python: str) -> None:
        super().__init__(python, ORACLE)

    def make_conditioned(self, case: Case) -> tuple[Path, dict[str, Any]]:
        """As `Oracle.make_conditioned`, with the adapters, which are drawn when the maps' names are known."""
        folder, answer = super().make_conditioned(case)
        if "refused" in answer:
            return folder, answer
        answer |= self._adapt(case, folder, answer)
        for _ in range(MOST_DRAWS if case["dtype"] == "float32" else 0):
            if not max(each.get("noise", 0.0) for each in answer["adapters"]) > MOST_NOISE_IN_FLOAT32:
                break
            for each in case["adapters"]:
                each["seed"] += 1
            answer |= self._adapt(case, folder, answer)
        if case["dtype"] != "float32" and max(each.get("noise", 0.0) for each in answer["adapters"]) > MOST_NOISE:
            case["dtype"] = "float32"  # in 16 bits rounding decides the logits
            for each in case["runs"]:
                each["dtype"] = "float32"
            return self.make_conditioned(case)
        return folder, answer

    def _adapt(self, case: Case, folder: Path, answer: dict[str, Any]) -> dict[str, Any]:
        for path in (*folder.glob("adapter_*"), folder / "floats", folder / "stored"):
            shutil.rmtree(path, ignore_errors=True)
        served, floats = store(folder, case["stored"])
        case["served"] = str(served)
        if "adapters" not in case:
            case["adapters"] = draw_adapters(random.Random(case["weights"]), case, answer, NUM_ADAPTERS)
        request = {name: case[name] for name in ("prompts", "adapters", "dtype", "weights")}
        found = self._peer.ask(
            "adapt", HANG_S, folder=str(floats), architecture=classes_of(case["family"])[1], **request
        )
        if floats != folder:
            for path in [*floats.glob("adapter_*"), floats / "adapted.npz"]:
                shutil.move(path, folder / path.name)
        return found


def drawn(options: argparse.Namespace) -> Iterator[Case]:
    """The cases of a command line."""
    if options.case:
        yield json.loads(options.case.read_text(encoding="utf-8"))
        return
    for index in range(options.first, options.first + options.num):
        rng = random.Random(f"{options.seed}:{index}")
        devices = options.device if rng.random() < options.emulated_share else []
        yield draw_stored(rng, options.family[index % len(options.family)], devices)


def write_goldens(oracle: AdapterOracle, folder: Path, seed: int, num: int, families: list[str]) -> None:
    """Writes `cases.json` and `oracle.npz`: small cases that `tests/models/test_fuzzed_adapters.py` runs without the
    oracle."""
    kept: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for index in itertools.count():
        if len(kept) == num:
            break
        rng, family = random.Random(f"{seed}:{index}"), families[len(kept) % len(families)]
        case = draw_stored(rng, family, ["emulated:sm_90a"] if len(kept) % 2 else [], is_small=True)
        case["prompts"] = case["prompts"][:1]
        if (case["stored"] == "dense") == (family in WITH_CODES):
            continue
        made, answer = oracle.make_conditioned(case)
        if "refused" in answer or any("refused" in each for each in answer["adapters"]):
            continue
        config = json.loads((made / "config.json").read_text(encoding="utf-8"))
        with np.load(made / "adapted.npz") as stored:
            arrays |= {f"{len(kept)}_{name}": array for name, array in stored.items()}
        configs = [
            _given(json.loads((made / f"adapter_{at}" / "adapter_config.json").read_text(encoding="utf-8")))
            for at in range(len(case["adapters"]))
        ]
        answer = {name: answer[name] for name in ("noise", "shapes", "adapters")}
        del case["served"], case["fields"], case["notes"], case["texts"]
        kept.append({"case": case, "config": config, "adapter_configs": configs, **answer})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n", encoding="utf-8")
    np.savez_compressed(folder / "oracle.npz", **arrays)


def _given(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True, help="a Python with torch, transformers and peft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=20, help="models")
    parser.add_argument("--first", type=int, default=0, help="number of the first model")
    parser.add_argument("--family", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--device", nargs="*", default=["emulated:sm_90a"])
    parser.add_argument("--emulated-share", type=float, default=0.4, help="of models that run on a device, too")
    parser.add_argument("--case", type=Path, help="run this case instead")
    parser.add_argument("--write-goldens", type=Path, help="keep small cases and their answers in this folder")
    options = parser.parse_args()
    oracle = AdapterOracle(options.peer_python)
    if options.write_goldens:
        write_goldens(oracle, options.write_goldens, options.seed, options.num, options.family)
        oracle.close()
        return 0
    return run(Checker(oracle, check_adapters, ("adapters", "noise")), oracle, drawn(options), None, options.first)


if __name__ == "__main__":
    sys.exit(main())
