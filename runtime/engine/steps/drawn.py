"""What a step drew, as one value that can be sent. It wakes no kernels."""

from __future__ import annotations

import msgspec

from runtime.engine.messages import TokenLogprobs


class Drawn(msgspec.Struct, kw_only=True):
    """What a step drew, token by token in the order of its chunks.

    counts           tokens of each chunk that draws: at least 1, at most its draws; None: one each
    is_valid         False where the logits held NaN or allowed no token, or the row's parameters failed. With several
                     draws a chunk's last one may be so.
    broken           tokens of the latter
    logprobs         an entry a token, None where its row asked for none; None: no row asked
    prompt_logprobs  entries for each of the step's ``prompt_logprobs``
    """

    token_ids: list[int] = []
    is_valid: list[bool] = []
    counts: list[int] | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[list[TokenLogprobs]] = []
    broken: list[int] = []
