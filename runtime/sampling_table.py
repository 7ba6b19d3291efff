"""The table of the sampling parameters that are one number a draw.

An entry has a parameter's name, its type and default for users, what it does, and its form for kernels. Derived from
it, in order: checks of requests, fields and bounds of the API, the command line's options, recommendations in a model's
files, the executor's rows, the columns of decode graphs, the fields of ``SamplingArrays``, the kernels' arguments. It
needs no library, so that the command line's help starts quickly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

MAX_FACTOR = 1e4
"""Bound of factors and divisors of logits, so that they stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The properties of a parameter.

    help        one line for the command line
    dtype       "float32", or "int32" for one that users give as an integer
    neutral     the value with which it does nothing; for ``temperature``: greedy
    low, high   bounds for users; ``is_low_open``: above ``low``
    is_penalty  unless neutral, its kernels count the ids of prompt and output
    shapes_draws  it does not affect greedy sampling
    is_recommended  a model's ``generation_config.json`` may recommend it
    reader      "kernel": all sampling kernels read it; "chain": only those of chains; "host": the engine alone
    """

    help: str
    dtype: Literal["float32", "int32"]
    neutral: float
    low: float
    high: float
    is_low_open: bool = False
    is_penalty: bool = False
    shapes_draws: bool = False
    is_recommended: bool = False
    reader: Literal["kernel", "chain", "host"] = "kernel"

    @property
    def kind(self) -> type[int] | type[float]:
        """The type that users give."""
        return int if self.dtype == "int32" else float


@dataclass(frozen=True, kw_only=True)
class SamplingNumbers:
    """The table."""

    temperature: Annotated[
        float,
        Column(
            help="0: always the most probable token.", dtype="float32", neutral=0.0, low=0.0, high=MAX_FACTOR,
            shapes_draws=True, is_recommended=True,
        ),
    ] = 1.0  # fmt: skip
    top_k: Annotated[
        int,
        Column(
            help="Keep the k most probable; 0 or -1: all.", dtype="int32", neutral=0, low=-1, high=2**31 - 1,
            shapes_draws=True, is_recommended=True,
        ),
    ] = 0  # fmt: skip
    top_p: Annotated[
        float,
        Column(
            help="Nucleus, in (0, 1].", dtype="float32", neutral=1.0, low=0.0, high=1.0, is_low_open=True,
            shapes_draws=True, is_recommended=True,
        ),
    ] = 1.0  # fmt: skip
    min_p: Annotated[
        float,
        Column(
            help="Least share of the largest probability.", dtype="float32", neutral=0.0, low=0.0, high=1.0,
            shapes_draws=True, is_recommended=True,
        ),
    ] = 0.0  # fmt: skip
    repetition_penalty: Annotated[
        float,
        Column(
            help="Over prompt and answer; 1: none.", dtype="float32", neutral=1.0, low=1 / MAX_FACTOR, high=MAX_FACTOR,
            is_penalty=True, is_recommended=True,
        ),
    ] = 1.0  # fmt: skip
    presence_penalty: Annotated[
        float,
        Column(
            help="Over the answer, in [-2, 2].", dtype="float32", neutral=0.0, low=-2.0, high=2.0, is_penalty=True,
        ),
    ] = 0.0  # fmt: skip
    frequency_penalty: Annotated[
        float,
        Column(
            help="Over the answer, for each time, in [-2, 2].", dtype="float32", neutral=0.0, low=-2.0, high=2.0,
            is_penalty=True,
        ),
    ] = 0.0  # fmt: skip
    top_n_sigma: Annotated[
        float,
        Column(
            help="Keep logits within n standard deviations of the largest; 0 or -1: all.", dtype="float32", neutral=0.0,
            low=-1.0, high=MAX_FACTOR, shapes_draws=True, reader="chain",
        ),
    ] = 0.0  # fmt: skip
    typical_p: Annotated[
        float,
        Column(
            help="Locally typical sampling, in (0, 1].", dtype="float32", neutral=1.0, low=0.0, high=1.0,
            is_low_open=True, shapes_draws=True, is_recommended=True, reader="chain",
        ),
    ] = 1.0  # fmt: skip
    xtc_probability: Annotated[
        float,
        Column(
            help="How often XTC drops the probable tokens but the least probable of them.", dtype="float32",
            neutral=0.0, low=0.0, high=1.0, shapes_draws=True, reader="chain",
        ),
    ] = 0.0  # fmt: skip
    xtc_threshold: Annotated[
        float,
        Column(
            help="Probability from which XTC may drop a token; above 0.5: it drops none.", dtype="float32",
            neutral=0.1, low=0.0, high=1.0, reader="chain",
        ),
    ] = 0.1  # fmt: skip
    dynatemp_range: Annotated[
        float,
        Column(
            help="How far entropy moves the temperature, down or up; 0: not at all.", dtype="float32", neutral=0.0,
            low=0.0, high=MAX_FACTOR, shapes_draws=True, reader="chain",
        ),
    ] = 0.0  # fmt: skip
    dynatemp_exponent: Annotated[
        float,
        Column(
            help="Exponent of the entropy's share of its maximum.", dtype="float32", neutral=1.0, low=0.0,
            high=MAX_FACTOR, reader="chain",
        ),
    ] = 1.0  # fmt: skip
    mirostat: Annotated[
        int,
        Column(
            help="2: Mirostat 2.0; 0: none.", dtype="int32", neutral=0, low=0, high=2, shapes_draws=True,
            reader="chain",
        ),
    ] = 0  # fmt: skip
    mirostat_tau: Annotated[
        float,
        Column(
            help="Mirostat's target for the surprise, in bits.", dtype="float32", neutral=5.0, low=0.0, high=MAX_FACTOR,
            reader="chain",
        ),
    ] = 5.0  # fmt: skip
    mirostat_eta: Annotated[
        float,
        Column(
            help="Mirostat's learning rate.", dtype="float32", neutral=0.1, low=0.0, high=MAX_FACTOR, reader="chain",
        ),
    ] = 0.1  # fmt: skip
    dry_multiplier: Annotated[
        float,
        Column(
            help="DRY's penalty of tokens that go on repeating; 0: none.", dtype="float32", neutral=0.0, low=0.0,
            high=MAX_FACTOR, reader="host",
        ),
    ] = 0.0  # fmt: skip
    dry_base: Annotated[
        float,
        Column(
            help="DRY's growth of the penalty with each repeated token.", dtype="float32", neutral=1.75, low=1.0,
            high=MAX_FACTOR, reader="host",
        ),
    ] = 1.75  # fmt: skip
    dry_allowed_length: Annotated[
        int,
        Column(
            help="Repeated tokens before DRY's penalty begins.", dtype="int32", neutral=2, low=0, high=2**31 - 1,
            reader="host",
        ),
    ] = 2  # fmt: skip
    dry_penalty_last_n: Annotated[
        int,
        Column(
            help="Last tokens in which DRY looks for repetitions; -1: all, 0: none.", dtype="int32", neutral=-1, low=-1,
            high=2**31 - 1, reader="host",
        ),
    ] = -1  # fmt: skip


COLUMNS: dict[str, Column] = {
    name: get_args(hint)[1] for name, hint in get_type_hints(SamplingNumbers, include_extras=True).items()
}
"""By parameter."""

KERNEL_COLUMNS = {name: column for name, column in COLUMNS.items() if column.reader == "kernel"}
"""In the order of the kernels' arguments."""

CHAIN_COLUMNS = {name: column for name, column in COLUMNS.items() if column.reader == "chain"}
"""In the order of a chain's words (`numba_kernels.sampler_chain`)."""

DEFAULTS: dict[str, float] = {field.name: field.default for field in fields(SamplingNumbers)}  # type: ignore[misc]

PENALTIES = {name: column.neutral for name, column in COLUMNS.items() if column.is_penalty}


def json_schema(name: str) -> dict[str, Any]:
    """A parameter's type and bounds as JSON schema."""
    column = COLUMNS[name]
    schema: dict[str, Any] = {"type": "integer" if column.dtype == "int32" else "number"}
    schema["exclusiveMinimum" if column.is_low_open else "minimum"] = column.low
    return schema | ({} if column.high == math.inf else {"maximum": column.high})
