"""The protocol shared by the peers' scripts: requests and answers are JSON lines.

Imported by a script in another interpreter, without this project. One JSON object a line comes in on stdin,
one goes out on stdout; all prints of libraries, also in C, go to stderr. Without a request the process waits for a
line, and the peer's threads sleep.

Requests (`op`):

- `load` {folder, threads, dtype, clock, task, adapters} → {versions …, threads, num_parameters, variants}; `task` is
  "generate", also without one, or "embed"; `adapters`, if there, are folders of LoRA adapters
- `logits` {token_ids: [int], path, adapter} → {path}: float32 `[num_tokens, vocab]`, saved there with numpy; `adapter`
  is the number of one, or null
- `generate` {prompts: [[int]], new_tokens, variant, adapters} → {token_ids, prefill_s, decode_s, total_s}; a variant is
  a setting of the peer, one of those in `load`'s answer; `adapters` are none, or the number of one for each prompt
- `embed` {prompts: [[int]], pooling, variant, path} → {path, wall_s, used_s}: vectors of length one, float32
  `[num_prompts, size]`, saved there with numpy; the clock's time, and the processor's
- `clock` → {}
- `quit`

With `clock` "processor" `generate` tells processor time instead of the wall clock's.

Every reply has `processor_s`, the processor time that this process has used since it started.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def answer(peer: Any) -> None:
    """Answers requests with the methods of `peer` until `quit`, or the end of stdin, when the parent dies."""
    del sys.path[0]  # the script's folder, whose names must not shadow modules
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries' prints are not answers
    answers: dict[str, Callable[..., dict[str, Any]]] = {
        "clock": dict,
        "load": peer.load,
        "logits": peer.logits,
        "generate": peer.generate,
        "embed": peer.embed,
    }
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        if op == "quit":
            return
        try:
            reply = answers[op](**request)
        except Exception as error:  # reported to the parent, which ends the benchmark
            reply = {"error": f"{type(error).__name__}: {error}"}
        reply["processor_s"] = time.process_time()
        print(json.dumps(reply), file=replies, flush=True)
