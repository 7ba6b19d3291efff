"""Intrinsics of host code, each as a function that writes its LLVM IR.

@emitted(types.int32, types.float32)
def float_bits(builder, x):
    return builder.bitcast(x, I32)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

KIND = "kind"
"""An argument that is a numpy class, such as np.float32; the function gets Numba's type of its elements."""
LITERAL = "literal"
"""An argument that is a constant of the calling code; the function gets its value."""


def emitted(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes an intrinsic of ``emit(builder, ...)``, which gets an IR value for each argument and returns the result's,
    or None for `types.void`. Arguments are Numba's types, `KIND` or `LITERAL`."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            settled: dict[int, Any] = {}
            for place, (wanted, found) in enumerate(zip(arguments, given, strict=True)):
                if wanted == KIND:
                    settled[place] = found.instance_type
                elif wanted == LITERAL:
                    if not isinstance(found, types.IntegerLiteral):
                        raise RequireLiteralValue(f"{emit.__name__}: argument {place} must be a literal")
                    settled[place] = found.literal_value

            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                made = emit(builder, *(settled.get(place, value) for place, value in enumerate(values)))
                return context.get_dummy_value() if made is None else made

            wanted_types = (given[place] if place in settled else each for place, each in enumerate(arguments))
            return result(*wanted_types), codegen

        typed.__name__, typed.__qualname__, typed.__module__ = emit.__name__, emit.__qualname__, emit.__module__
        typed.__doc__, typed.__signature__ = emit.__doc__, inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate
