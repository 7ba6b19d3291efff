"""One side of `compare_checkouts`: an engine driven by JSON lines, run as a script by any checkout's Python.

It uses only what all versions have: `LLM`, `SamplingParams` and the times of a choice. It reads one object a line on
stdin, and writes one on stdout. Requests (`op`):

- `load` {folder, settings} → {}: of `LLM`
- `run` {prompts: [[int]], new_tokens, salt} → {token_ids, arrival_s, first_token_s, last_token_s}, a number a prompt;
  and processor_s, the process's CPU time
"""

import json
import os
import sys
import time
from typing import Any

from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM


class Side:
    """One loaded model."""

    def __init__(self) -> None:
        self.llm: Any = None

    def load(self, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
        if self.llm is not None:
            self.llm.close()
        self.llm = LLM(folder, device="cpu", skip_tokenizer_init=True, **settings)
        return {}

    def run(self, prompts: list[list[int]], new_tokens: int, salt: str) -> dict[str, Any]:
        """Greedy tokens of all prompts, none of which are in the prefix cache."""
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
        begun = time.process_time()
        choices = [output.outputs[0] for output in self.llm.generate(given, params, use_tqdm=False)]
        used, times = time.process_time() - begun, [choice.times for choice in choices]
        return {
            "processor_s": used,
            "token_ids": [choice.token_ids for choice in choices],
            **{
                name: [getattr(each, name) for each in times] for name in ("arrival_s", "first_token_s", "last_token_s")
            },
        }


def main() -> None:
    side = Side()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries' prints are not answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(side, request.pop("op"))(**request)
        except Exception as error:  # reported to the parent, which ends the comparison
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
