"""The table of the sampling parameters that are one number a sequence.

A line names a parameter, its type and default for users, and how kernels get it. Checks of requests, the API's bounds,
the executor's rows, the columns that decode graphs read, the fields of ``SamplingArrays`` and the kernels' arguments
derive from it, in this order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import numpy as np

MAX_FACTOR = 1e4
"""Bound of what logits are multiplied with or divided by, so that they stay finite."""


@dataclass(frozen=True, slots=True)
class Column:
    """How kernels get a parameter.

    dtype       float32, or int32 for one that users give as an integer
    neutral     the value with which it does nothing; for ``temperature``: greedy
    low, high   bounds of what users may give; ``is_low_open``: above ``low``
    is_penalty  its kernels count the ids of prompt and output where it is not neutral
    """

    dtype: type[np.float32] | type[np.int32]
    neutral: float
    low: float
    high: float
    is_low_open: bool = False
    is_penalty: bool = False


class SamplingNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The table; ``SamplingParams`` says what they mean."""

    temperature: Annotated[float, Column(np.float32, 0.0, 0.0, MAX_FACTOR)] = 1.0
    top_k: Annotated[int, Column(np.int32, 0, -1, 2**31 - 1)] = 0
    top_p: Annotated[float, Column(np.float32, 1.0, 0.0, 1.0, is_low_open=True)] = 1.0
    min_p: Annotated[float, Column(np.float32, 0.0, 0.0, 1.0)] = 0.0
    repetition_penalty: Annotated[float, Column(np.float32, 1.0, 1 / MAX_FACTOR, MAX_FACTOR, is_penalty=True)] = 1.0
    presence_penalty: Annotated[float, Column(np.float32, 0.0, -2.0, 2.0, is_penalty=True)] = 0.0
    frequency_penalty: Annotated[float, Column(np.float32, 0.0, -2.0, 2.0, is_penalty=True)] = 0.0


COLUMNS: dict[str, Column] = {
    name: get_args(hint)[1] for name, hint in get_type_hints(SamplingNumbers, include_extras=True).items()
}
"""By parameter, in the order of the kernels' arguments."""

PENALTIES = {name: column.neutral for name, column in COLUMNS.items() if column.is_penalty}


def json_schema(name: str) -> dict[str, Any]:
    """A parameter's type and bounds as JSON schema."""
    column = COLUMNS[name]
    schema: dict[str, Any] = {"type": "integer" if column.dtype is np.int32 else "number"}
    schema["exclusiveMinimum" if column.is_low_open else "minimum"] = column.low
    return schema | ({} if column.high == math.inf else {"maximum": column.high})
