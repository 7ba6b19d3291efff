"""Any PTX instruction as a Numba intrinsic.

    load = instruction("ld.global.v2.u32 {$0, $1}, [$2];", "rr", "l")             # load(address) -> (a, b)
    mma = instruction("mma.sync... {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$0,$1,$2,$3};",
                      "ffff", "rrrr rr", is_accumulating=True, is_pure=True)      # mma(acc, a, b) -> acc

Operands are ``$0, $1 ...``, outputs first. Their types are letters as in inline assembly: ``h`` 16 bits (uint16), ``r``
32 bits (uint32), ``l`` 64 bits (uint64), ``f`` float32, ``d`` float64. Inputs are written in groups, one an argument: a
group of one letter takes a number, a longer one a tuple. One output is returned as itself, several as a tuple.

An accumulating instruction takes its outputs' old values as a first argument (in the same registers, ``$0 ...``).

Only an instruction that moves from registers to registers is pure. An instruction that reads or writes memory, or
synchronises, must not be marked so: it then clobbers memory and has side effects, and LLVM keeps it in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.cuda.extending import intrinsic

_TOGETHER = re.compile(r"\.(sync|aligned)\b|\bbar(rier)?\.")
_LLVM = {"h": ir.IntType(16), "r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType(), "d": ir.DoubleType()}
_NUMBA = {"h": types.uint16, "r": types.uint32, "l": types.uint64, "f": types.float32, "d": types.float64}


def call(builder: Any, assembly: ir.InlineAsm, operands: list[Any]) -> Any:
    """Calls inline assembly. An instruction of lanes together is convergent: LLVM may not make it depend on a further
    condition, such as by a copy of it in each side of a branch that came before it."""
    return builder.call(assembly, operands, attrs=("convergent",) if _TOGETHER.search(assembly.asm) else ())


def _numba_type(letters: str) -> Any:
    """The type of an argument or of the result."""
    if not letters:
        return types.void
    kinds = [_NUMBA[letter] for letter in letters]
    if len(kinds) == 1:
        return kinds[0]
    return types.UniTuple(kinds[0], len(kinds)) if len(set(kinds)) == 1 else types.Tuple(kinds)


def instruction(
    text: str, outputs: str = "", inputs: str = "", *, is_pure: bool = False, is_accumulating: bool = False
) -> Any:
    """A function for kernels that executes `text`; its syntax is in the module's docstring."""
    groups = inputs.split()
    letters = "".join(groups)
    constraints = [f"={letter}" for letter in outputs] + list(letters)
    operand_types = [_LLVM[letter] for letter in letters]
    if is_accumulating:
        groups = [outputs, *groups]
        constraints += [str(index) for index in range(len(outputs))]
        operand_types += [_LLVM[letter] for letter in outputs]
    if not is_pure:
        constraints.append("~{memory}")
    output_types = [_LLVM[letter] for letter in outputs]
    returned = (
        ir.VoidType() if not outputs else output_types[0] if len(outputs) == 1 else ir.LiteralStructType(output_types)
    )
    assembly = ir.InlineAsm(
        ir.FunctionType(returned, operand_types), text, ",".join(constraints), side_effect=not is_pure
    )
    signature = _numba_type(outputs)(*[_numba_type(group) for group in groups])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values: list[list[Any]] = []
        for group, argument in zip(groups, arguments):
            values.append(
                [argument]
                if len(group) == 1
                else [builder.extract_value(argument, index) for index in range(len(group))]
            )
        if is_accumulating:
            values = values[1:] + values[:1]
        result = call(builder, assembly, [value for group in values for value in group])
        if not outputs:
            return context.get_dummy_value()
        if len(outputs) == 1:
            return result
        parts = [builder.extract_value(result, index) for index in range(len(outputs))]
        return context.make_tuple(builder, signature.return_type, parts)

    return intrinsic(_WITH_ARGUMENTS[len(groups)]((signature, generate)))


# An intrinsic's arguments are counted by its Python signature.
_WITH_ARGUMENTS: tuple[Callable[[Any], Callable[..., Any]], ...] = (
    lambda typed: lambda context: typed,
    lambda typed: lambda context, a: typed,
    lambda typed: lambda context, a, b: typed,
    lambda typed: lambda context, a, b, c: typed,
    lambda typed: lambda context, a, b, c, d: typed,
    lambda typed: lambda context, a, b, c, d, e: typed,
    lambda typed: lambda context, a, b, c, d, e, f: typed,
    lambda typed: lambda context, a, b, c, d, e, f, g: typed,
    lambda typed: lambda context, a, b, c, d, e, f, g, h: typed,
    lambda typed: lambda context, a, b, c, d, e, f, g, h, i: typed,
    lambda typed: lambda context, a, b, c, d, e, f, g, h, i, j: typed,
)
