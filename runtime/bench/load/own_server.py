"""Our own server for `bench serve`, in a process of its own: `python -m runtime.bench.load.own_server`.

The separate process keeps the client off the server's GIL; the engine runs in a third process, as in `xserv serve`, so
the measurement is what users see. It speaks the protocol of `ChildProcess`: `start` with the arguments of
`start_client` loads the model, listens on a free port of 127.0.0.1 and answers {port, model, vocab_size, max_model_len,
weight_bytes, kv_cache_bytes, environment}; `cpu` answers {cpu_s}, this process's CPU time so far, without its engine's;
when stdin ends, the server ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from runtime.bench.environment import describe_engine
from runtime.engine.make_client import start_client
from runtime.errors import XservError
from runtime.text.load import load_tokenizer
from server.app import create_app
from server.transport.protocol import uvicorn_config


def _serve(arguments: dict[str, Any], reply: Callable[[dict[str, Any]], None]) -> None:
    client = start_client(**arguments)
    info = client.info
    app = create_app(client, load_tokenizer(Path(info.model_path)), model_name=info.model_name)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        threading.Thread(target=_answer, args=(reply,), daemon=True).start()
        reply(
            {
                "port": listener.getsockname()[1],
                "model": info.model_name,
                "vocab_size": info.vocab_size,
                "max_model_len": info.max_model_len,
                "weight_bytes": info.weight_bytes,
                "kv_cache_bytes": info.kv_cache_bytes,
                "environment": describe_engine(info),
            }
        )
        uvicorn.Server(uvicorn_config(app, app.config)).run(sockets=[listener])


def _answer(reply: Callable[[dict[str, Any]], None]) -> None:
    """Answers until the parent ends, then ends the engine."""
    while sys.stdin.buffer.readline():
        reply({"cpu_s": time.process_time()})
    os._exit(0)


def main() -> None:
    """Serves until stdin ends."""
    replies, sys.stdout = sys.stdout, sys.stderr

    def reply(fields: dict[str, Any]) -> None:
        print(json.dumps(fields), file=replies, flush=True)

    request = json.loads(sys.stdin.buffer.readline())
    del request["op"]
    try:
        _serve(request, reply)
    except XservError as error:
        reply({"error": str(error)})


if __name__ == "__main__":
    main()
