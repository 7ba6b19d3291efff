"""What proposals out of earlier text are worth where code is edited and texts are summarised: tokens a step.

    python -m tools.measuring.measure_suffix --texts FILE [FILE ...] [--tokenizer FOLDER] [--model FOLDER] [--num 20]
            [--tokens 7]

*Known answers*: an answer is what a model that does its task would write, and every proposal is held against it. Code
is a file of this repository in which one name is replaced throughout and a comment is put in front of some definitions.
A summary has each fifth sentence of a passage, with words of its own between. Tokens are the tokenizer's.

*A model's answers*: the same prompts, as much as it has positions for, are given to a trained model, which decodes
greedily whatever it makes of them; all proposals are tried.

A step's tokens are those that it keeps, the one that comes without proposals included.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import engine_of
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Request, Sequence
from runtime.engine.speculation.drafter import Drafter
from runtime.engine.speculation.ngram import NgramDrafter, SuffixDrafter
from runtime.text.load import read_tokenizer
from tokenizer import Tokenizer

Task = tuple[str, str]
"""A prompt and the answer."""

SENTENCES, EACH = 40, 5
"""Of a passage, and which of them a summary has."""

JOINTS = ("In short: ", "Then we read: ", "Later: ", "Besides, ", "At last: ")


def edits(files: Iterable[Path]) -> list[Task]:
    """The name that stands most often is replaced; every third definition gets a comment."""
    tasks = []
    for file in files:
        code = file.read_text(encoding="utf-8")[:8000]
        names = Counter(re.findall(r"\b[a-z_]{8,}\b", code))
        if not names:
            continue
        ((name, _),) = names.most_common(1)
        answer, count = [], 0
        for line in code.splitlines(keepends=True):
            if line.lstrip().startswith(("def ", "class ")):
                count += 1
                if count % 3 == 0:
                    answer.append(f"{line[: len(line) - len(line.lstrip())]}# Changed, see the notes above.\n")
            answer.append(re.sub(rf"\b{name}\b", f"new_{name}", line))
        prompt = f"Rename {name} to new_{name} in this file, and mark what you change.\n```\n{code}\n```\n"
        tasks.append((prompt, "".join(answer)))
    return tasks


def summaries(texts: Iterable[str], num: int) -> list[Task]:
    """Of passages that stand one behind another in each text."""
    tasks = []
    for text in texts:
        sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
        for first in range(0, min(len(sentences) - SENTENCES, num * SENTENCES), SENTENCES):
            passage = sentences[first : first + SENTENCES]
            chosen = passage[::EACH]
            answer = " ".join(JOINTS[i % len(JOINTS)] + sentence for i, sentence in enumerate(chosen))
            tasks.append((f"Summarise this text.\n\n{' '.join(passage)}\n\n", answer))
    return tasks


def of_known(tasks: list[Task], tokenizer: Tokenizer, drafter: Drafter, most: int) -> tuple[int, int]:
    """Tokens of the answers, and the steps that they take."""
    tokens = steps = 0
    for number, (prompt, answer) in enumerate(tasks):
        ids = tokenizer.encode(answer)
        params = SamplingParams(max_tokens=len(ids) + 1)
        given = np.array(tokenizer.encode(prompt), np.int32)
        sequence = Sequence(Request(str(number), given, params, max_tokens=len(ids) + 1, arrival_s=0.0), 0)
        done = 0
        while done < len(ids):
            drafts = drafter.propose(sequence, most)[0].tolist()
            kept = 1
            while kept <= len(drafts) and done + kept < len(ids) and drafts[kept - 1] == ids[done + kept - 1]:
                kept += 1
            for token_id in ids[done : done + kept]:
                sequence.num_pending += 1
                sequence.append(token_id)
            done, steps = done + kept, steps + 1
        drafter.end(sequence)
        tokens += len(ids)
    return tokens, steps


def of_model(tasks: list[Task], folder: Path, name: str, most: int, num_tokens: int = 128) -> tuple[int, int]:
    """The same of what a model says, whose prompts are cut to their ends."""
    config = EngineConfig(device="cpu", speculation=name, num_speculative_tokens=most, seed=0, kv_cache_bytes=1 << 26)
    engine, tokenizer = engine_of(folder, config), read_tokenizer(folder)
    assert engine.speculator is not None
    engine.speculator.tries_all()
    room = engine.limits.max_model_len - num_tokens
    tokens = steps = 0
    for number, (prompt, _) in enumerate(tasks):
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.add(
            EngineRequest(request_id=str(number), prompt_token_ids=tokenizer.encode(prompt)[-room:], params=params)
        )
        is_first = True
        while engine.has_work:
            count = sum(len(output.new_token_ids) for output in engine.step())
            if count and not is_first:  # the first comes with the prompt
                tokens, steps = tokens + count, steps + 1
            is_first = is_first and not count
    engine.close()
    return tokens, steps


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer for known answers")
    parser.add_argument("--model", type=Path, help="folder of a trained model")
    parser.add_argument("--num", type=int, default=20, help="files, and passages of each text")
    parser.add_argument("--tokens", type=int, default=7, help="most proposals a step")
    options = parser.parse_args()
    files = sorted(Path(__file__).parents[2].glob("runtime/engine/*/*.py"))
    chosen = {
        "code, edited": edits([file for file in files if file.stat().st_size > 3000][: options.num]),
        "texts, summarised": summaries((file.read_text(encoding="utf-8") for file in options.texts), options.num),
    }
    for kind, tasks in chosen.items():
        if options.tokenizer is not None:
            tokenizer = read_tokenizer(options.tokenizer)
            for drafter in (NgramDrafter(), SuffixDrafter()):
                tokens, steps = of_known(tasks, tokenizer, drafter, options.tokens)
                print(f"{kind}, known answers, {drafter.name}: {tokens / steps:.2f} tokens a step "
                      f"({len(tasks)} answers, {tokens:,} tokens)")  # fmt: skip
        for name in ("ngram", "suffix") if options.model is not None else ():
            tokens, steps = of_model(tasks, options.model, name, options.tokens)
            print(f"{kind}, {options.model.name}, {name}: {tokens / steps:.2f} tokens a step "
                  f"({len(tasks)} answers, {tokens:,} tokens)")  # fmt: skip


if __name__ == "__main__":
    main()
