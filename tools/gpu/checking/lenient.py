"""Makes tests continue after failures, so that a dummy device sees all of their launches.

In modules of `tests` imported after `install`, assertions are evaluated and their outcome is ignored; a call statement
may raise AssertionError, or the IndexError of a comparison of zeros. `pytest.raises` passes without an error. Divisors
may be zero. Nested functions are unchanged: kernels are among them.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import numpy as np

from runtime.tensor import arithmetic
from tools.gpu.sections import ROOT


def install() -> None:
    """Makes tests lenient until the process ends."""
    of_arithmetic = vars(arithmetic)
    for each in (np.floor_divide, np.remainder):  # results, and so divisors, are zeros
        of_arithmetic[each.__name__] = of_arithmetic["_binary_operation"](
            each.__name__, each, of_arithmetic["_as_number"]
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "tests":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and str(spec.origin).startswith(str(ROOT)):
            spec.loader = _Loader(fullname, str(spec.origin))
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        """Always compiles from the source: the result must not reach a cache of compiled files."""
        path = self.get_filename(fullname)
        tree = _Ignoring().visit(ast.parse(self.get_data(path), path))
        code: types.CodeType = compile(ast.fix_missing_locations(tree), path, "exec")
        return code


class _Ignoring(ast.NodeTransformer):
    def __init__(self) -> None:
        self._is_in_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        if self._is_in_function:
            return node
        self._is_in_function = True
        self.generic_visit(node)
        self._is_in_function = False
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        return _tried(node, ast.copy_location(ast.Expr(node.test), node), ["Exception"])

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        calls = [each.context_expr for each in node.items if isinstance(each.context_expr, ast.Call)]
        is_raises = any(isinstance(call.func, ast.Attribute) and call.func.attr == "raises" for call in calls)
        return _tried(node, node, ["BaseException"]) if is_raises else node  # pytest's own are not Exceptions

    def visit_Expr(self, node: ast.Expr) -> Any:
        is_call = isinstance(node.value, ast.Call)
        return _tried(node, node, ["AssertionError", "IndexError"]) if is_call else node


def _tried(node: ast.stmt, statement: ast.stmt, errors: list[str]) -> ast.stmt:
    names = ast.Tuple([ast.Name(error, ast.Load()) for error in errors], ast.Load())
    handler = ast.ExceptHandler(names, None, [ast.Pass()])
    return ast.copy_location(ast.Try([statement], [handler], [], []), node)
