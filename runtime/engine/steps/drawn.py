"""A step's sampled tokens, as one value that can be sent. It imports no kernels."""

from __future__ import annotations

import msgspec

from runtime.engine.messages import TokenLogprobs


class Drawn(msgspec.Struct, kw_only=True):
    """A step's sampled tokens, in the order of its chunks.

    counts           tokens of each chunk that samples: at least 1, at most its draws; None means one each
    is_valid         False if the logits held NaN or allowed no token, or the row's parameters failed. With several
                     draws a chunk's last one may be so.
    broken           tokens of rows whose parameters failed
    logprobs         an entry a token, None if its row did not request any; None if no row did
    prompt_logprobs  entries for each of the step's ``prompt_logprobs``
    """

    token_ids: list[int] = []
    is_valid: list[bool] = []
    counts: list[int] | None = None
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[list[TokenLogprobs]] = []
    broken: list[int] = []
