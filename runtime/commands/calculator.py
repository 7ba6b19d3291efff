"""The tool of `xserv chat --calculator`: sums, products, quotients and powers of numbers, and no other Python."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

NAME = "calculator"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
_MOST_CHARACTERS = 200
_LARGEST = 1e15  # of any number, to keep powers and products small

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def answer(name: str, arguments: str) -> str:
    """A call's result: a number, or an error message for the model."""
    if name != NAME:
        return f"error: there is no tool {name!r}, only {NAME!r}"
    try:
        expression = json.loads(arguments)["expression"]
        return _shown(_value(_parsed(expression)))
    except (ValueError, TypeError, KeyError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {type(error).__name__}: {error}"


def _parsed(expression: Any) -> ast.expr:
    if not isinstance(expression, str) or len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"expression must be a text of at most {_MOST_CHARACTERS} characters")
    return ast.parse(expression.replace("^", "**").strip(), mode="eval").body


def _value(node: ast.expr) -> int | float:
    found: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        found = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise ValueError("an exponent is at most 64")
        found = _BINARY[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        found = _UNARY[type(node.op)](_value(node.operand))
    else:
        raise ValueError("an expression has numbers, + - * / // % ** and brackets")
    if isinstance(found, complex) or not abs(found) <= _LARGEST:
        raise ValueError(f"a number is at most {_LARGEST:g}")
    return found  # type: ignore[no-any-return]


def _shown(value: int | float) -> str:
    """Formats whole numbers exactly, others to four digits."""
    return str(round(value)) if value == round(value) else f"{value:.4g}"
