"""Every limit that the server holds a request to, beside the engine's own (`EngineInfo`,
`SamplingParams`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Limits of the HTTP server.

    max_body_bytes          largest request body; beyond it the answer is 413
    max_discarded_bytes     how much of a too large body is read and thrown away, so that a client that only
                            listens once it has sent everything gets to see the 413; beyond it the
                            connection is closed
    body_timeout_s          seconds a body may take to arrive; beyond it the answer is 408
    max_json_depth          deepest nesting of arrays and objects in a body
    max_prompts             most prompts in one request
    max_choices             most choices (prompts × n) in one request
    num_tokenizer_threads   threads that render chat templates and encode prompts, away from the event loop
    """

    max_body_bytes: int = 8 * 1024 * 1024
    max_discarded_bytes: int = 256 * 1024 * 1024
    body_timeout_s: float = 60.0
    max_json_depth: int = 64
    max_prompts: int = 256
    max_choices: int = 1024
    num_tokenizer_threads: int = 2
