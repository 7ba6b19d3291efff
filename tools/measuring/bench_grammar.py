"""What grammars cost: building a vocabulary, compiling a schema, a mask a token, and the masks of a whole step.

    python tools/measuring/bench_grammar.py ../shared/data/tokenizers/qwen3 --num-seqs 32

No model runs: each sequence draws at random among the ids that its mask allows, and begins anew at its end. A step
computes the masks of all sequences as the engine does, applies them and follows the drawn tokens. Times are of the
wall, in microseconds, and of all cores together (cpu); on a busy machine the latter tells more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from runtime.engine.errors import RequestError
from runtime.engine.grammar.compiler import compile_grammar
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.matcher import MaskComputer
from runtime.engine.grammar.vocabulary import Vocabulary
from tests.runtime.engine.schema_cases import schema_case
from tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--num-schemas", type=int, default=300)
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()

    tokenizer = Tokenizer.from_pretrained(arguments.tokenizer)
    eos = tokenizer.eos_token_id
    begun, cpu = time.perf_counter(), time.process_time()
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, () if eos is None else (eos,))
    results: dict[str, Any] = {
        "vocab_size": vocabulary.vocab_size,
        "vocabulary_s": round(time.perf_counter() - begun, 3),
        "vocabulary_cpu_s": round(time.process_time() - cpu, 3),
    }
    compiling, working, matchers = [], [], []
    for seed in range(arguments.num_schemas):
        grammar = Grammar(kind="json_schema", text=json.dumps(schema_case(seed)))
        begun, cpu = time.perf_counter(), time.process_time()
        try:
            matchers += compile_grammar(grammar, vocabulary, 1)
        except RequestError as error:
            print(f"schema {seed}: {error}", file=sys.stderr)
            continue
        compiling.append(time.perf_counter() - begun)
        working.append(time.process_time() - cpu)
    results["compile_us"], results["compile_cpu_us"] = spread(compiling), spread(working)
    results["num_refused"] = arguments.num_schemas - len(matchers)

    rng = np.random.default_rng(0)
    masks, working = [], []
    for matcher in matchers:
        for _ in range(40):
            begun, cpu = time.perf_counter(), time.thread_time()
            bits = np.frombuffer(matcher.ll_matcher.compute_bitmask(), np.uint8)
            masks.append(time.perf_counter() - begun)
            working.append(time.thread_time() - cpu)
            if matcher.is_complete or not matcher.consume(drawn(bits, rng)):
                break
        matcher.ll_matcher.reset()
    results["mask_us"], results["mask_cpu_us"] = spread(masks), spread(working)
    results |= steps(matchers, vocabulary, arguments.num_seqs, arguments.num_steps, rng)
    print(json.dumps(results, indent=2))
    if arguments.output_json is not None:
        arguments.output_json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def steps(
    matchers: list[Any], vocabulary: Vocabulary, num_seqs: int, num_steps: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Of `num_seqs` sequences at a time: from the start of the masks until they are applied, and the following."""
    request = SimpleNamespace(stop_ids=dict.fromkeys(vocabulary.eos_token_ids))
    waiting = list(matchers)
    sequences: list[Any] = []
    computer = MaskComputer()
    num_words = -(-vocabulary.vocab_size // 32)
    computing, working, following = [], [], []
    for _ in range(num_steps):
        while len(sequences) < num_seqs:
            matcher = waiting.pop(0)
            matcher.ll_matcher.reset()
            sequences.append(SimpleNamespace(request=request, matcher=matcher))
            waiting.append(matcher)
        begun, cpu = time.perf_counter(), time.process_time()
        allowed = np.full((num_seqs, num_words), 0xFFFFFFFF, np.uint32)
        pending = computer.start(sequences, np.ones(num_seqs, np.int64), {})
        assert pending is not None
        draws, masks, failed = pending.wait()
        allowed[draws] &= masks[:, :num_words]
        computing.append(time.perf_counter() - begun)
        working.append(time.process_time() - cpu)
        tokens = [drawn(row.view(np.uint8), rng) for row in allowed]
        begun = time.perf_counter()
        alive = [
            sequence.matcher.consume(token) and not sequence.matcher.is_complete
            for sequence, token in zip(sequences, tokens)
        ]
        following.append(time.perf_counter() - begun)
        sequences = [s for place, s in enumerate(sequences) if alive[place] and place not in failed]
    computer.close()
    return {
        "num_seqs": num_seqs,
        "step_masks_us": spread(computing),
        "step_masks_cpu_us": spread(working),
        "step_consume_us": spread(following),
    }


def drawn(bits: Any, rng: np.random.Generator) -> int:
    """One of the ids whose bits are set."""
    return int(rng.choice(np.unpackbits(bits, bitorder="little").nonzero()[0]))


def spread(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds) * 1e6
    return {
        "mean": round(float(values.mean()), 1),
        "median": round(float(np.median(values)), 1),
        "p99": round(float(np.percentile(values, 99)), 1),
        "most": round(float(values.max()), 1),
    }


if __name__ == "__main__":
    main()
