"""The logits processors of an executor's rows: which act on a row, and their work on a step's logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import ops
from runtime.device.device import Device
from runtime.engine.errors import RequestError
from runtime.engine.logits.processors import MAX_NUMBERS, LogitsKernel, Processor, checked_numbers, told
from runtime.engine.messages import ErrorCode
from runtime.engine.steps.step_input import RowLoad
from runtime.tensor.tensor import Tensor

logger = logging.getLogger("xserv.engine")

Failure = tuple[ErrorCode, str]
"""Why a sample failed."""

History = tuple[NDArray[np.int32], NDArray[np.int32]]
"""The ids of a prompt and of an output."""

_Kernel = tuple[LogitsKernel, NDArray[np.float32]]
_Function = Callable[[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]], Any]


class _Failed(Exception):
    """A processor has failed; the message says which and why."""


def try_kernels(processors: Sequence[Processor], device: Device, vocab_size: int) -> None:
    """Compile the kernels among the processors for a device, and run each once. Raises ``RequestError`` for one with
    which that fails."""
    for each in processors:
        if not isinstance(each.given, LogitsKernel):
            continue
        ids, numbers = np.zeros(1, np.int32), np.zeros(MAX_NUMBERS, np.float32)
        try:
            logits = ops.place([np.zeros((1, vocab_size), np.float32)], device)[0]
            ops.process_logits(logits, 0, ids, ids, numbers, each.given.function)
            logits.to("cpu")
        except Exception as error:
            raise RequestError(
                f"logits_processors: {each.name} does not run on {device}: {told(error)}", param="logits_processors"
            ) from error


class RowProcessors:
    """The processors that act on each row. Belongs to the engine's loop."""

    def __init__(self, processors: Sequence[Processor]) -> None:
        self._processors = processors
        self._prompts: dict[int, NDArray[np.int32]] = {}
        self._acting: dict[int, list[tuple[str, _Function | _Kernel]]] = {}
        self._failures: dict[int, Failure] = {}

    def load(self, load: RowLoad) -> bool:
        """A row belongs to another sequence. True if a processor acts on it."""
        row, acting = load.row, list[tuple[str, _Function | _Kernel]]()
        self.forget(row)
        for each in self._processors:
            try:
                found = _for_request(each.given, load.extra_args or {})
            except Exception as error:
                self._failures[row] = "invalid_extra_args", f"extra_args: {each.name} refuses them: {told(error)}"
                break
            if found is not None:
                acting.append((each.name, found))
        if acting:
            self._acting[row] = acting
            assert load.processed_prompt_ids is not None, "the assembler sends them"
            self._prompts[row] = _unwritable(load.processed_prompt_ids)
        return bool(acting) or row in self._failures

    def forget(self, row: int) -> None:
        """The row has no processors."""
        for table in (self._acting, self._failures, self._prompts):
            table.pop(row, None)

    def apply(
        self, logits: Tensor, rows: Sequence[int], outputs: Sequence[NDArray[np.int32]], suppressed: Tensor | None
    ) -> tuple[Tensor, dict[int, Failure]]:
        """The logits ``[n, vocab_size]`` of samples after their rows' processors, which are other memory, and the
        samples that failed, whose logits are left as they were.

        rows, outputs  the row of each sample, and its output before it
        suppressed     ids that stay forbidden
        """
        failures = {i: self._failures[row] for i, row in enumerate(rows) if row in self._failures}
        wanted = [i for i, row in enumerate(rows) if row in self._acting and i not in failures]
        if not wanted:
            return logits, failures
        if logits.device.kind == "cpu":
            changed = Tensor.from_numpy(logits.array.copy())
        else:
            changed = ops.gather_rows(logits, ops.place([np.arange(len(rows), dtype=np.int32)], logits.device)[0])
        for i in wanted:
            try:
                self._process(changed, i, (self._prompts[rows[i]], _unwritable(outputs[i])), self._acting[rows[i]])
            except _Failed as error:
                logger.warning("a request fails: %s", error)
                failures[i] = "logits_processor_failed", str(error)
                if logits.device.kind == "cpu":
                    changed.array[i] = logits.array[i]
        if suppressed is not None:
            ops.forbid(changed, suppressed)
        return changed, failures

    def left_nothing(self, row: int) -> Failure:
        """The failure of a sample of the row for which there was no token, although no processor failed."""
        names = ", ".join(name for name, _ in self._acting[row])
        problem = f"after the logits processors {names} the logits held NaN or allowed no token"
        return "logits_processor_failed", problem

    def acts_on(self, row: int) -> bool:
        """Whether a processor acts on the row."""
        return row in self._acting

    def _process(
        self, logits: Tensor, i: int, history: History, acting: Sequence[tuple[str, _Function | _Kernel]]
    ) -> None:
        for name, each in acting:
            if isinstance(each, tuple):
                ops.process_logits(logits, i, *history, each[1], each[0].function)
            else:
                logits.array[i] = _called(name, each, history, logits.array[i].copy())
            if logits.device.kind == "cpu":
                _check_values(name, logits.array[i])


def _for_request(given: Any, extra_args: dict[str, Any]) -> _Function | _Kernel | None:
    if isinstance(given, LogitsKernel):
        numbers = given.numbers(extra_args) if callable(given.numbers) else given.numbers
        return None if numbers is None else (given, np.array(checked_numbers(list(numbers)), np.float32))
    new_request = getattr(given, "new_request", None)
    if new_request is None:
        function: _Function = given
        return function
    made = new_request(extra_args)
    if made is not None and not callable(made):
        raise TypeError(f"new_request gave {made!r:.80}, must give a function or None")
    asked: _Function | None = made
    return asked


def _called(name: str, function: _Function, history: History, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shape = logits.shape
    try:
        found = function(*history, logits)
    except Exception as error:
        raise _Failed(f"the logits processor {name} failed: {told(error)}") from error
    if not isinstance(found, np.ndarray):
        raise _Failed(f"the logits processor {name} returned {type(found).__name__}, must return a float32 array")
    if found.dtype != np.float32 or found.shape != shape:
        problem = f"returned {found.dtype} {list(found.shape)}, must return float32 {list(shape)}"
        raise _Failed(f"the logits processor {name} {problem}")
    return found


def _check_values(name: str, logits: NDArray[np.float32]) -> None:
    largest = logits.max()
    if not largest < np.inf:
        raise _Failed(f"the logits processor {name} returned {'NaN' if np.isnan(largest) else 'plus infinity'}")
    if largest == -np.inf:
        raise _Failed(f"the logits processor {name} forbade every token")


def _unwritable(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    view = ids.view()
    view.flags.writeable = False
    return view
