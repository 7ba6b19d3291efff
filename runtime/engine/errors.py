"""The engine's errors, as its users catch them.

XservError
├── RequestError            a field of a request or of the config is wrong (a ValueError): `.param`,
`.code`
│   ├── ContextLengthExceededError   the prompt does not fit the context; code "context_length_exceeded"
│   └── UnknownOptionError           an unknown keyword (also a TypeError)
├── InvariantError          the scheduler's bookkeeping is broken: a bug
├── QueueFullError          the waiting queue is full: `.retry_after_s`
└── EngineDeadError         the engine was closed, or has died: `.retry_after_s`
"""

from __future__ import annotations

from runtime.errors import InvalidArgumentError, XservError


class RequestError(InvalidArgumentError):
    """A field has a wrong type, lies outside its range or contradicts another.

    param  the field's name
    code   a short constant for programs, as OpenAI's `error.code`
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = "invalid_value") -> None:
        ValueError.__init__(self, message)
        self.param = param
        self.code = code


class ContextLengthExceededError(RequestError):
    """The prompt leaves no room for the answer's first token within `max_model_len`; without an answer it does not fit
    itself."""

    def __init__(
        self, num_prompt_tokens: int, max_model_len: int, *, has_answer: bool = True, param: str = "prompt"
    ) -> None:
        answer = ", and the answer needs at least one" if has_answer else ""
        is_named = param not in ("prompt", "messages", "token_ids")  # else it is the whole request's
        own, shown = (param, "it") if is_named else ("The prompt", "the prompt")
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. {own} has {num_prompt_tokens}"
            f"{answer}: please shorten {shown}",
            param=param,
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class UnknownOptionError(RequestError, TypeError):
    """A function or a type has no option of this name; the message suggests the nearest one."""


class InvariantError(XservError):
    """The scheduler's bookkeeping contradicts itself; going on could show one request another's tokens."""


class QueueFullError(XservError):
    """The waiting queue is at its `limit` of requests or prompt tokens (`unit`), which `option` sets. Retry after
    `retry_after_s` seconds."""

    def __init__(self, limit: int, retry_after_s: float, unit: str = "requests") -> None:
        self.option = "max_waiting_tokens" if unit == "tokens" else "max_waiting"
        why = f"{self.option} is {limit} {unit}"
        super().__init__(f"the waiting queue is full ({why}); retry in {retry_after_s:.0f} s")
        self.limit = limit
        self.unit = unit
        self.retry_after_s = retry_after_s


class EngineDeadError(XservError):
    """The engine was closed, or has died. `retry_after_s` is the estimated time in seconds until it has restarted, or
    None if it will not restart."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
