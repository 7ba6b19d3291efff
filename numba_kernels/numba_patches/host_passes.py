"""Skips needless work of Numba for host code: the same machine code in three quarters of the time.

    list_vars           an instruction's variables, found by the types of its fields
    PostProcessor.run   the parts for generators are left out
    get_call_type       a call of Numba's own functions is typed once for each function and types of arguments
    str                 instructions are not written out for a trace that is never read

And Python collects no garbage meanwhile. Kernels of GPUs have passes of their own (`cuda_passes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import ir, lowering, postproc
from numba.core.types import BaseFunction

from numba_kernels.numba_patches.patching import is_known, replaced, without_collection

_is_inside = False


@contextmanager
def host_passes() -> Iterator[None]:
    """Host code that is compiled inside is compiled by this module's passes; may be entered again inside.

    The caller holds numba's global compiler lock.
    """
    global _is_inside
    if _is_inside or not is_known("numba"):
        yield
        return
    parts = [
        *variable_listers(ir, ir.Var, ir.Inst),
        post_processing(postproc),
        (BaseFunction, "get_call_type", _get_call_type),
        (lowering, "str", lambda instruction: ""),
    ]
    try:
        _is_inside = True
        with without_collection(), replaced(parts):
            yield
    finally:
        _is_inside = False


@functools.cache
def variable_listers(ir: Any, variables: Any, instructions: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Makes the replacement of `Stmt.list_vars` and `Expr.list_vars` of the module ``ir``, whose variables and
    instructions have these types."""

    @functools.cache
    def holds(kind: type) -> str:
        """The way to an instruction's variables from a field of this type."""
        for held, bases in (("variable", variables), ("own", instructions), ("items", (list, tuple)), ("values", dict)):
            if issubclass(kind, bases):
                return held
        return ""

    def variables_in(values: Iterable[Any]) -> list[Any]:
        found = []
        for value in values:
            held = holds(value.__class__)
            if not held:
                continue
            if held == "variable":
                found.append(value)
            elif held == "own":
                found += value.list_vars()
            else:
                found += variables_in(value if held == "items" else value.values())
        return found

    def of_statement(statement: Any) -> list[Any]:
        return variables_in(statement.__dict__.values())

    def of_expression(expression: Any) -> list[Any]:
        return variables_in(expression._kws.values())

    return [(ir.Stmt, "list_vars", of_statement), (ir.Expr, "list_vars", of_expression)]


@functools.cache
def post_processing(postproc: Any) -> tuple[Any, str, Callable[..., Any]]:
    """Makes the replacement of `PostProcessor.run` of the module ``postproc``: the same without the variables at each
    block's entry, unless of a generator, which needs them."""
    own_run = postproc.PostProcessor.run

    def run(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        function = processor.func_ir
        if function.is_generator:
            own_run(processor, emit_dels, extend_lifetimes)
            return
        function.blocks = postproc.transforms.canonicalize_cfg(function.blocks)
        function.variable_lifetime = postproc.VariableLifetime(function.blocks)  # computes only requested sets
        function.generator_info = None
        if emit_dels:
            processor._insert_var_dels(extend_lifetimes=extend_lifetimes)

    return postproc.PostProcessor, "run", run


_type_call: Callable[..., Any] = BaseFunction.get_call_type
_typed: dict[tuple[int, int, tuple[Any, ...]], tuple[Any, Any, Any]] = {}
"""By function, context and types of arguments: the signature; holds function and context, so that their ids stay."""


def _get_call_type(function: Any, context: Any, arguments: Any, keywords: Any) -> Any:
    """`BaseFunction.get_call_type`, which remembers the signatures of calls that Numba lowers by the function's own
    key. Calls that need a compilation (an overload, an intrinsic) are typed each time."""
    if keywords:
        return _type_call(function, context, arguments, keywords)
    key = id(function), id(context), tuple(arguments)
    if key not in _typed:
        signature = _type_call(function, context, arguments, keywords)
        if function._impl_keys[signature.args] is not function.typing_key:
            return signature
        _typed[key] = signature, function, context
    signature = _typed[key][0]
    function._impl_keys[signature.args] = function.typing_key
    return signature
