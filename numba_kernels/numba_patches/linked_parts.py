"""Compiles a kernel's callees only as far as the kernel needs: to LLVM's IR, which is linked into it.

Numba makes each function that compiled code calls ready to be called on its own: optimised, with wrappers for Python
and for C, assembled, loaded. A kernel takes only its IR, and optimises all of that again. Inside `linked_parts` the
functions that are compiled on the way are its parts, and a kernel compiles in half to two thirds of the time:

    BaseNativeLowering.run_pass                     a part has no wrappers
    CPUContext.get_executable                       nor an address
    CodeLibrary.finalize                            its module is linked with its own parts, neither optimised nor
                                                    assembled
    CodeLibrary._optimize_functions                 a function is optimised with its module, not before, too
    Dispatcher.add_overload                         it is not registered with Python
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.cpu import CPUContext
from numba.core.dispatcher import Dispatcher
from numba.core.typed_passes import BaseNativeLowering

from numba_kernels.numba_patches.patching import is_known, replaced

_overloads: list[tuple[Dispatcher, tuple[Any, ...], Any]] = []  # that only kernels may find


class _Part:
    """Numba's handle of a compiled function that Python cannot call."""


def is_part(result: Any) -> bool:
    """Whether it was compiled as a part, and has no machine code of its own."""
    return isinstance(result.entry_point, _Part)


_is_shown = False


@contextmanager
def known_parts() -> Iterator[bool]:
    """Lets code compiled inside find parts that were compiled before. Yields whether no other compilation is under way;
    may be entered again inside.

    The caller holds numba's global compiler lock.
    """
    global _is_shown
    if _is_shown:
        yield False
        return
    for dispatcher, arguments, result in _overloads:
        dispatcher.overloads.setdefault(arguments, result)
    _is_shown = True
    try:
        with replaced([(Dispatcher, "add_overload", _add_overload)]):
            yield True
    finally:
        _is_shown = False
        for dispatcher, arguments, result in _overloads:
            if dispatcher.overloads.get(arguments) is result:
                del dispatcher.overloads[arguments]


@contextmanager
def linked_parts() -> Iterator[None]:
    """Functions that are compiled inside are parts: of the one whose address is then taken, or of the dispatcher
    that is being compiled outside. May be entered again inside.

    The caller holds numba's global compiler lock.
    """
    if JITCodeLibrary.finalize is _finalize or not is_known("numba"):
        yield
        return
    methods = [
        (BaseNativeLowering, "run_pass", _lower_without_wrappers(BaseNativeLowering.run_pass)),
        (CPUContext, "get_executable", lambda context, library, description, environment: _Part()),
        (JITCodeLibrary, "finalize", _finalize),
        (JITCodeLibrary, "get_pointer_to_function", _get_pointer_to_function),
        (JITCodeLibrary, "_optimize_functions", _set_layout),
    ]
    with known_parts(), replaced(methods):
        yield


def _lower_without_wrappers(run_pass: Callable[..., Any]) -> Callable[..., Any]:
    def run(lowering: Any, state: Any) -> Any:
        if not state.flags.no_compile:  # as `numba.cfunc` does for the kernel itself
            state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        return run_pass(lowering, state)

    return run


_make_ready = JITCodeLibrary.finalize
_find_pointer = JITCodeLibrary.get_pointer_to_function


def _finalize(library: Any) -> None:
    """`CodeLibrary.finalize` up to where it would optimise."""
    for other in dict.fromkeys(library._linking_libraries):
        library._reload_init.update(other._reload_init)
        library._final_module.link_in(other._get_module_for_linking(), preserve=True)
    library._finalize_dynamic_globals()
    library._finalized = True


def _get_pointer_to_function(library: Any, name: str) -> Any:
    """The kernel's: all of it is optimised and assembled now."""
    if not library._finalized:
        _make_ready(library)
    return _find_pointer(library, name)


def _set_layout(library: Any, module: Any) -> None:
    module.data_layout = library._codegen._data_layout


_add_function = Dispatcher.add_overload


def _add_overload(dispatcher: Dispatcher, result: Any) -> None:
    if not is_part(result):
        _add_function(dispatcher, result)
        return
    arguments = tuple(result.signature.args)
    dispatcher.overloads[arguments] = result
    _overloads.append((dispatcher, arguments, result))
