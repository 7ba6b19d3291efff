"""What the scripts of peers share: requests come in as JSON lines, answers go out so.

Imported by a script in another interpreter, which has none of ours beside it. One JSON object a line comes in on stdin,
one goes out on stdout; whatever libraries print, in C too, goes to stderr. While no request is under way the process
waits for a line, and the peer's threads sleep.

Requests (`op`):

- `load` {folder, threads, dtype} → {versions …, threads, num_parameters, variants}
- `logits` {token_ids: [int], path} → {path}: float32 `[num_tokens, vocab]`, saved there with numpy
- `generate` {prompts: [[int]], new_tokens, variant} → {token_ids, prefill_s, decode_s, total_s}; a variant is a setting
  of the peer's, one of those that `load` names
- `clock` → {}
- `quit`

Every reply has `processor_s`, the processor time that this process has used since it started.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def answer(peer: Any) -> None:
    """Answers requests with the methods of `peer` until `quit`, or until stdin ends: when the parent dies."""
    del sys.path[0]  # the script's folder, whose names must not hide anybody's modules
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    answers: dict[str, Callable[..., dict[str, Any]]] = {
        "clock": dict,
        "load": peer.load,
        "logits": peer.logits,
        "generate": peer.generate,
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
