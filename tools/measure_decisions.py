"""Measures the cost of questions about one text in `LLM.decide`, beside that of the text alone and then of the same
prompts with the text in the prefix cache.

    python -m tools.measure_decisions [--questions 8 32] [--tokens 2000] [--repetitions 5] [--json FILE]

The model is a decoder with seeded weights (`--hidden-size`, `--layers`) and the bundled model's tokenizer. Both ways
take turns in one process; the least times count, with processor time, all threads', beside them."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import models.demo
from runtime.bench.environment import processor_name
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM
from runtime.version import release

DEMO = Path(models.demo.__file__).parent
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprob_token_ids=[1, 2], detokenize=False)


def write_model(folder: Path, hidden_size: int, num_layers: int, max_tokens: int) -> None:
    """A Qwen3 of this size, whose weights `load_format="dummy"` makes."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder)
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 64, "num_key_value_heads": max(1, hidden_size // 128), "head_dim": 64,
        "max_position_embeddings": max_tokens,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, the processor's seconds, the result."""
    start, busy = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - start, time.process_time() - busy, result


def measured(llm: LLM, text: str, num_questions: int, repetitions: int) -> dict[str, Any]:
    """One line of the result."""
    best: dict[str, Sequence[float]] = {}
    numbers = count()
    for _ in range(repetitions):
        questions = [
            {"type": "predicate", "instructions": f"Does {next(numbers)} occur?"} for _ in range(num_questions)
        ]
        prompts = [
            llm.chat_prompt([{"role": "user", "content": f"{text}\n\n{each['instructions']}\n\nAnswer with A or B."}])
            for each in questions
        ]
        common = len([*takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))])
        llm.client.reset_prefix_cache().result()
        alone = timed(partial(llm.generate, [prompts[0][:common]], ONE_TOKEN))
        after = timed(partial(llm.generate, prompts, ONE_TOKEN, use_tqdm=False))
        llm.client.reset_prefix_cache().result()
        decided = timed(partial(llm.decide, text, questions, use_tqdm=False))
        parts = [one + other for one, other in zip(alone[:2], after[:2], strict=True)]
        for name, took in (("decide", decided[:2]), ("parts", parts)):
            best[name] = [*map(min, best.get(name, took), took)]
        (decision,) = decided[2]
        num_computed = decision.num_prompt_tokens - decision.num_cached_tokens
        length = decision.num_prompt_tokens / num_questions
    ideal = common + num_questions * (length - common)
    return {
        "questions": num_questions, "prompt_tokens": length, "common_tokens": common, "computed_tokens": num_computed,
        "tokens_ratio": num_computed / ideal,
        "decide_s": best["decide"][0], "decide_processor_s": best["decide"][1],
        "parts_s": best["parts"][0], "parts_processor_s": best["parts"][1],
        "ratio": best["decide"][0] / best["parts"][0], "processor_ratio": best["decide"][1] / best["parts"][1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=2000, help="of the text")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--note", default="", help="about the machine, kept in the file")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), given.hidden_size, given.layers, given.tokens + 200)
        with LLM(name, load_format="dummy", use_tqdm_on_load=False) as llm:
            ids = llm.get_tokenizer().encode("The quick brown fox jumps over the lazy dog. " * given.tokens)
            text = llm.get_tokenizer().decode(ids[: given.tokens])
            rows = [measured(llm, text, each, given.repetitions) for each in given.questions]
    arguments = {name: value for name, value in vars(given).items() if name != "json"}
    result = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"), "processor": processor_name(), "xserv": release(),
        "command": "python -m tools.measure_decisions", "arguments": arguments, "rows": rows,
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
