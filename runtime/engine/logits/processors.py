"""Logits processors: how they are written, named and loaded.

A processor is a function of one sequence's next token, which the engine calls before everything else that shapes it
(allowed ids, bias, penalties, temperature, filters, grammars):

    def no_digits(prompt_token_ids, output_token_ids, logits):
        logits[DIGITS] = -np.inf
        return logits

``prompt_token_ids`` and ``output_token_ids`` are int32 arrays that may not be written, ``logits [vocab_size]`` is a
float32 array of the function's own. It returns such an array: without NaN or plus infinity, and with a token that is
not forbidden. Its result must depend on its arguments alone: it is also called for drafted tokens that are not kept,
each rank calls it, and after a preemption it goes on with the same history.

An object with ``new_request(extra_args)`` gives each request such a function, or None for a request that it leaves
alone; ``extra_args`` is the request's own, a dict. A class is such an object, too: it is made without arguments.

A ``LogitsKernel`` is compiled for the device; a GPU takes no other processors.

A name is MODULE:NAME, or that of an entry point of the group ``xserv.logits_processors``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.engine.errors import RequestError
from runtime.later import later

_metadata = later("importlib.metadata")  # twenty modules

ENTRY_POINTS = "xserv.logits_processors"
_OPTION = "logits_processors"
MAX_NUMBERS = 64
"""Most numbers that a kernel gets beside the logits."""

NumbersOf = Callable[[dict[str, Any]], "Sequence[float] | None"]


@dataclass(frozen=True, eq=False)
class LogitsKernel:
    """A processor that Numba compiles for CPUs and GPUs.

    function  ``(token_id, logits, prompt_ids, num_prompt, output_ids, num_output, numbers)``: the new logit of a token.
              It reads the four arrays by index alone, and returns in one place
    numbers   at most 64, for ``numbers``; or a function of a request's ``extra_args`` that gives them, or None to
              leave the request alone

    Raises ``RequestError``.
    """

    function: Callable[..., Any]
    numbers: Sequence[float] | NumbersOf = ()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise RequestError(f"{_OPTION}: function must be a function, got {self.function!r:.80}", param=_OPTION)
        if not callable(self.numbers):
            checked_numbers(self.numbers)


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor that is loaded, and its name in messages."""

    name: str
    given: Any


def checked_numbers(numbers: object) -> tuple[float, ...]:
    """A kernel's numbers. Raises ``RequestError``."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) > MAX_NUMBERS:
        raise RequestError(f"numbers must be at most {MAX_NUMBERS} numbers, got {numbers!r:.80}", param=_OPTION)
    for each in numbers:
        if isinstance(each, bool) or not isinstance(each, (int, float)):
            raise RequestError(f"numbers must be numbers, got {each!r:.80}", param=_OPTION)
    return tuple(map(float, numbers))


def checked(processors: object) -> tuple[Any, ...]:
    """The option's value: names, and processors themselves. Raises ``RequestError``."""
    if not isinstance(processors, (list, tuple)):
        raise RequestError(
            f"{_OPTION} must be a list of processors, or of names, got {processors!r:.80}", param=_OPTION
        )
    for each in processors:
        if isinstance(each, str):
            module, colon, name = each.partition(":")
            if not module or (colon and not name):
                raise RequestError(
                    f"{_OPTION}: a name is MODULE:NAME or an entry point's of {ENTRY_POINTS}, got {each!r:.80}",
                    param=_OPTION,
                )
        elif not _is_processor(each):
            raise RequestError(
                f"{_OPTION}: a processor is a function, a LogitsKernel or has new_request, got {each!r:.80}",
                param=_OPTION,
            )
    return tuple(processors)


def _is_processor(given: object) -> bool:
    return isinstance(given, LogitsKernel) or callable(given) or callable(getattr(given, "new_request", None))


def as_names(processors: Sequence[Any]) -> tuple[str, ...]:
    """The processors as names, for other processes. Raises ``RequestError`` for one that cannot be named."""
    return tuple(each if isinstance(each, str) else _name_of(each) for each in processors)


def _name_of(given: Any) -> str:
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and module != "__main__":
        try:
            if _attribute(importlib.import_module(module), name) is given:
                return f"{module}:{name}"
        except (ImportError, AttributeError):
            pass
    raise RequestError(
        f"{_OPTION}: {shown(given)} cannot be sent to another process: give its name, MODULE:NAME", param=_OPTION
    )


def shown(given: Any) -> str:
    """A processor's name in messages."""
    if isinstance(given, str):
        return given
    named = given.function if isinstance(given, LogitsKernel) else given
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}:{named.__qualname__}"


def load_processors(processors: Sequence[Any], device: str, *, makes: bool = True) -> tuple[Processor, ...]:
    """The processors of an engine on this device; without ``makes`` classes stay classes. Raises ``RequestError`` for
    one that is not there, or that does not run there."""
    loaded = []
    for each in processors:
        given = _named(each) if isinstance(each, str) else each
        name = shown(each)
        if isinstance(given, type) and makes:
            try:
                given = given()
            except Exception as error:
                raise RequestError(f"{_OPTION}: {name} could not be made: {told(error)}", param=_OPTION) from error
        if not _is_processor(given):
            raise RequestError(
                f"{_OPTION}: {name} is {given!r:.80}, neither a function nor a LogitsKernel, and has no new_request",
                param=_OPTION,
            )
        if device != "cpu" and not isinstance(given, LogitsKernel):
            raise RequestError(
                f"{_OPTION}: {name} computes with numpy, on the CPU alone: on {device} a processor must be a "
                "LogitsKernel",
                param=_OPTION,
            )
        loaded.append(Processor(name, given))
    return tuple(loaded)


def _named(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        return _entry_point(name)
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise RequestError(f"{_OPTION}: {name}: {module} cannot be imported: {told(error)}", param=_OPTION) from error
    try:
        return _attribute(found, attribute)
    except AttributeError:
        raise RequestError(f"{_OPTION}: {module} has no {attribute}", param=_OPTION) from None


def _entry_point(name: str) -> Any:
    found = _metadata.entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        known = ", ".join(sorted(found.names)) or "none is installed"
        raise RequestError(f"{_OPTION}: no entry point {name!r:.80} of {ENTRY_POINTS}: {known}", param=_OPTION)
    try:
        return found[name].load()
    except Exception as error:
        raise RequestError(f"{_OPTION}: {name} cannot be loaded: {told(error)}", param=_OPTION) from error


def _attribute(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def told(error: Exception) -> str:
    """An error of a user's code in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400] if text else type(error).__name__
