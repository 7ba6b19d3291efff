"""Measures the quality of each format of weights and pages: perplexity, compared with the dequantised twin's, and exact
match of the bundled model.

    python -m tools.quality --work FOLDER --output-json FILE [--gguf FILE ...] [--num 100] [--only NAME ...]
    python -m tools.quality --model FOLDER --text FILE --max-tokens 20000 --work FOLDER --output-json FILE

The bundled model was trained on answers alone, so its perplexity is that of the right answers to held-out questions
(of `tools/eval_demo_model.py`), each after its question; another model's is that of a text.

`FOLDER` gets the models that `xserv quantize` writes. A twin is the same files with `--dtype float32`: every quantised
matrix becomes floats. Rows already in the JSON are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.checkpoints.hub import BUNDLED_MODEL
from models.quantized.write import quantize_folder
from runtime import LLM, SamplingParams
from runtime.bench.environment import describe_machine
from runtime.bench.perplexity import measure
from runtime.text.load import read_tokenizer
from tools.demo_model import tasks
from tools.eval_demo_model import ask

FORMATS = ("fp8", "fp8-block", "int8", "int4-g32", "int4", "mxfp4")
CALIBRATED = ("int4-g32", "int4", "mxfp4")


def rows(args: argparse.Namespace) -> Iterator[tuple[str, Path, dict[str, Any], bool]]:
    """Name, model, options, and whether there is a twin."""
    model = args.model
    yield "float32", model, {"dtype": "float32"}, False
    yield "bfloat16", model, {}, False
    for format in FORMATS:
        yield format, args.work / f"{model.name}-{format}", {}, True
    for format in CALIBRATED:
        yield f"{format} calibrated", args.work / f"{model.name}-{format}-calibrated", {}, True
    yield "--quantization int8", model, {"quantization": "int8"}, False
    yield "--quantization int4", model, {"quantization": "int4"}, False
    for each in ("int8", "fp8"):
        yield f"pages {each}", model, {"kv_cache_dtype": each}, False
    for path in args.gguf:
        yield f"GGUF {path.stem.rpartition('-')[2]}", path, {}, True


def make(args: argparse.Namespace, name: str, folder: Path) -> None:
    format, _, calibrated = name.partition(" ")
    if format in FORMATS and not folder.exists():
        chosen = None
        if calibrated:
            text = args.calibration.read_text(encoding="utf-8")
            chosen = read_tokenizer(args.model).encode(text)[:4096]
        quantize_folder(args.model, folder, format, calibration=chosen)


def measured(args: argparse.Namespace, folder: Path, options: dict[str, Any], has_twin: bool) -> dict[str, Any]:
    turns = [turn for task in tasks.TASKS for turn in tasks.held_out_questions(task, args.num, 0)]
    random.Random(0).shuffle(turns)

    def perplexity(llm: LLM) -> dict[str, Any]:
        if args.text is None:
            return of_answers(llm, turns)
        return measure(llm, args.text.read_text(encoding="utf-8"), args.window, None, args.max_tokens)

    settings: dict[str, Any] = {"device": "cpu", "enable_prefix_caching": False}
    with LLM(str(folder), **settings, **options) as llm:
        report = perplexity(llm)
        if args.text is None:
            texts = ask(llm, [[{"role": "user", "content": turn.question}] for turn in turns])
            right = tasks.score(turns, texts)[-1].num_right
            report |= {"num_questions": len(turns), "num_right": right, "exact_match": right / len(turns)}
    if has_twin:
        with LLM(str(folder), **settings, dtype="float32") as llm:
            report["twin_perplexity"] = perplexity(llm)["perplexity"]
        report["over_twin"] = report["perplexity"] / report["twin_perplexity"] - 1
    return report


def of_answers(llm: LLM, turns: list[tasks.Turn]) -> dict[str, Any]:
    """The perplexity of the right answers' tokens, their ends included."""
    encode = llm.get_tokenizer().encode
    asked = [encode(f"<|user|>{turn.question}<|end|><|assistant|>") for turn in turns]
    answers = [encode(f"{turn.answer}<|end|>") for turn in turns]
    prompts = [[*question, *answer] for question, answer in zip(asked, answers, strict=True)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scores: list[float] = []
    for question, answer, output in zip(asked, answers, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None, output.outputs[0].error
        entries = output.prompt_logprobs[len(question) :]
        scores += [entry[token].logprob for entry, token in zip(entries, answer, strict=True) if entry is not None]
    nats = -math.fsum(scores) / len(scores)
    return {"perplexity": math.exp(nats), "nats_per_token": nats, "num_scored_tokens": len(scores)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--text", type=Path, help="a file in UTF-8; without it the bundled model's questions")
    parser.add_argument("--work", type=Path, required=True, help="a folder for what is made")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="the model's GGUF files")
    parser.add_argument("--calibration", type=Path, help="another text than the one that is scored")
    parser.add_argument("--num", type=int, default=100, help="questions a task of the bundled model")
    parser.add_argument("--window", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--output-json", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, Any] = {"rows": {}}
    if args.output_json.exists():
        report = json.loads(args.output_json.read_text(encoding="utf-8"))
    for name, folder, options, has_twin in rows(args):
        if name in report["rows"] or (args.only and name not in args.only):
            continue
        if "calibrated" in name and args.calibration is None:
            continue
        make(args, name, folder)
        report["rows"][name] = found = measured(args, folder, options, has_twin)
        base = report["rows"].get("bfloat16", found)["perplexity"]
        print(f"{name}: {found['perplexity']:.5f} ({found['perplexity'] / base - 1:+.3%})", flush=True)
        about = {"model": args.model.name, "text": args.text.name if args.text else "answers", **describe_machine()}
        args.output_json.write_text(json.dumps({**about, **report}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
