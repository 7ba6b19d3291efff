"""Our own server for `bench serve`, in a process of its own: `python -m runtime.bench.own_server`.

In its own process so that the client's work does not take turns with the engine's on one interpreter lock:
what is measured is what users of the server see. It speaks the protocol of `ChildProcess`: `start` with the
arguments of `LLM` loads the model, listens on a free port of 127.0.0.1 and answers {port, model,
vocab_size, environment}; when stdin ends, the server ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any, TextIO

from runtime.errors import XservError


def _serve(arguments: dict[str, Any], replies: TextIO) -> None:
    import uvicorn

    from runtime.bench.environment import describe_engine
    from runtime.llm import LLM
    from server.app import create_app

    with LLM(**arguments) as llm, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        info = llm.client.info
        app = create_app(llm.client, llm.tokenizer, model_name=info.model_name)
        ready = {
            "port": listener.getsockname()[1],
            "model": info.model_name,
            "vocab_size": info.vocab_size,
            "max_model_len": info.max_model_len,
            "environment": describe_engine(info),
        }
        print(json.dumps(ready), file=replies, flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def _leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serves until stdin ends."""
    replies, sys.stdout = sys.stdout, sys.stderr
    request = json.loads(sys.stdin.buffer.readline())
    del request["op"]
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        _serve(request, replies)
    except XservError as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)


if __name__ == "__main__":
    main()
