"""Exact match of the demo model's answers, in our engine, on questions held out of training, by task.

    python -m tools.eval_demo_model                      # table on stdout
    python -m tools.eval_demo_model --check              # and exit status 1 if a goal is missed
    python -m tools.eval_demo_model --quantization int8  # as `xserv serve --quantization int8` would answer
    python -m tools.eval_demo_model --conversation 30    # that many sums in one conversation, history and all
    python -m tools.eval_demo_model --experts            # the model with experts: thoughts, calls, answers
    python -m tools.eval_demo_model --vision             # the model with a tower: questions about drawings

It measures the quality of quantised and speculative runs: same questions for the same `--seed`, greedy answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from runtime import LLM, SamplingParams
from tools.demo_model import evaluation, tasks

MAX_ANSWER_TOKENS = 64
ROOT = Path(__file__).resolve().parent.parent


def ask(llm: LLM, conversations: list[list[tasks.Message]]) -> list[str]:
    """The greedy answer to each conversation, all in one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    return [output.outputs[0].text for output in llm.chat(conversations, params)]


def ask_in_one_conversation(llm: LLM, turns: list[tasks.Turn]) -> list[str]:
    """The answers to questions of one conversation, with the model's own earlier answers."""
    messages: list[tasks.Message] = []
    texts = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        texts += ask(llm, [messages])
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", action="store_true", help="the tasks of the demo model with experts")
    parser.add_argument("--vision", action="store_true", help="the tasks of the demo model with a tower")
    parser.add_argument("--model", type=Path, help="default: models/demo, demo_moe or demo_vision")
    parser.add_argument("--device", help="the engine's choice where not given")
    parser.add_argument("--quantization", default="none", help="of the weights: none or int8")
    parser.add_argument("--num", type=int, default=100, help="questions a task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--conversation", type=int, metavar="TURNS", help="ask two-digit sums in one conversation")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--show-wrong", action="store_true", help="print each wrong answer on stderr")
    parser.add_argument("--check", action="store_true", help="exit with status 1 where a goal is missed")
    args = parser.parse_args()

    options: dict[str, Any] = {"quantization": args.quantization}
    if args.device is not None:
        options["device"] = args.device
    name = "demo_moe" if args.experts else "demo_vision" if args.vision else "demo"
    llm = LLM(str(args.model or ROOT / "models" / name), **options)
    for is_asked, evaluate, goals in (
        (args.experts, evaluation.evaluate_experts, evaluation.EXPERTS_GOALS),
        (args.vision, evaluation.evaluate_vision, evaluation.VISION_GOALS),
    ):
        if is_asked:
            _report(args, *evaluate(llm, args.num, args.seed), goals)
            return
    if args.conversation:
        turns = tasks.held_out_questions("sum_2", args.conversation, args.seed)
        texts = ask_in_one_conversation(llm, turns)
    else:
        turns = [turn for task in tasks.TASKS for turn in tasks.held_out_questions(task, args.num, args.seed)]
        random.Random(args.seed).shuffle(turns)  # answers of all lengths in each batch, as in serving
        texts = ask(llm, [[{"role": "user", "content": turn.question}] for turn in turns])
    scores = tasks.score(turns, texts)
    wrong = [
        f"{turn.task}: {turn.question!r} gave {text!r}, not {turn.answer!r}"
        for turn, text in zip(turns, texts, strict=True)
        if not tasks.is_exact(turn, text)
    ]
    _report(args, scores, wrong, tasks.GOALS)


def _report(args: argparse.Namespace, scores: list[tasks.Score], wrong: list[str], goals: dict[str, float]) -> None:
    """Prints the scores, and exits with 1 if a goal is missed under `--check`."""
    missed = tasks.missed_goals(scores, goals)
    if args.show_wrong:
        print("\n".join(wrong), file=sys.stderr)
    if args.json:
        rows = {s.task: {"questions": s.num_questions, "right": s.num_right, "percent": s.percent} for s in scores}
        print(json.dumps(rows, indent=2))
    else:
        print(tasks.format_scores(scores))
    for line in missed:
        print(line, file=sys.stderr)
    if args.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
