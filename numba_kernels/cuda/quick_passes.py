"""What in Numba's front end takes time quadratic in a kernel's size: the same results in less.

Numba inlines a kernel's device functions (`intrinsics.device`), which makes it long, and then goes over all of it again
for each call, each variable, each operator. Inside `quick_passes` a kernel compiles in less than half the time:

    run_untyped_passes     a device function is read once a kernel, not once a call
    Scope, Loc             copies of inlined code share what nobody changes
    _run_ssa               a variable's versions are sought in the blocks that name it
    compute_live_map       sets of variables are bits of a number
    PostProcessor.run      what only generators need is left out
    resolve_function_type  a call is typed once for each function and types of arguments

They replace functions of one version of numba-cuda, which `pyproject.toml` fixes; of another, none. A test compiles
kernels with and without them: the PTX is the same.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from numba.core.types import BaseFunction
from numba.cuda.core import analysis, inline_closurecall, ir, postproc, ssa
from numba.cuda.core.bytecode import FunctionIdentity
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.typing.context import BaseContext

REPLACED_VERSION = "0.30.4"  # of numba-cuda


@contextmanager
def quick_passes() -> Iterator[None]:
    """Kernels that are compiled inside are compiled by this module's passes. Other threads' compilations wait."""
    if version("numba-cuda") != REPLACED_VERSION:
        yield
        return
    replaced: list[tuple[Any, str, Any]] = [
        (inline_closurecall.InlineWorker, "run_untyped_passes", _reader_of_functions()),
        (ir.Scope, "__deepcopy__", _copy_of_scope),
        (ir.Loc, "__deepcopy__", lambda loc, memo: loc),
        (ssa, "_run_ssa", _run_ssa),
        (analysis, "compute_live_map", _compute_live_map),
        (postproc.PostProcessor, "run", _post_process),
        (BaseContext, "resolve_function_type", _resolver_of_calls()),
    ]
    with global_compiler_lock:
        before = [(owner, name, vars(owner).get(name)) for owner, name, _ in replaced]
        try:
            for owner, name, function in replaced:
                setattr(owner, name, function)
            yield
        finally:
            for owner, name, function in before:
                if function is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, function)


def _reader_of_functions() -> Callable[..., Any]:
    """`InlineWorker.run_untyped_passes`, which reads each function once. Who inlines its IR copies that first."""
    read = inline_closurecall.InlineWorker.run_untyped_passes
    known: dict[Any, Any] = {}

    def run_untyped_passes(worker: Any, function: Any, enable_ssa: bool = False) -> Any:
        if function not in known:
            known[function] = read(worker, function, enable_ssa)
            return known[function]
        worker.flags.enable_ssa = enable_ssa
        found = known[function].copy()
        identity = copy.copy(found.func_id)  # a number of its own, which names the variables of this call
        identity.unique_id = next(FunctionIdentity._unique_ids)
        identity.unique_name = f"{identity.func_qualname}${identity.unique_id}"
        found.func_id = identity
        return found

    return run_untyped_passes


def _copy_of_scope(scope: Any, memo: dict[int, Any]) -> Any:
    """A scope's copy, with the same variables. Numba copies each variable with it, once for every block."""
    made = ir.Scope(scope.parent, scope.loc)
    made.localvars._con.update(scope.localvars._con)
    made.redefined.update(scope.redefined)
    made.var_redefinitions.update({name: set(names) for name, names in scope.var_redefinitions.items()})
    memo[id(scope)] = made
    return made


def _run_ssa(blocks: dict[int, Any]) -> dict[int, Any]:
    """Single assignment by Numba's handlers, each variable's over those blocks alone that name it."""
    cfg = ssa.compute_cfg_from_blocks(blocks)
    frontiers = ssa._iterated_domfronts(cfg)
    variables = ssa._find_defs_violators(blocks, cfg)
    named_in: dict[str, list[int]] = {name: [] for name in variables}
    for label, block in blocks.items():
        names = {variable.name for statement in block.body for variable in statement.list_vars()}
        for name in names & named_in.keys():
            named_in[name].append(label)
    handler = ssa._FixSSAVars(ssa._CacheListVars())
    blocks = dict(blocks)
    for name, labels in named_in.items():
        part, assigned = ssa._fresh_vars({label: blocks[label] for label in labels}, name)
        phis: dict[int, list[Any]] = defaultdict(list)
        states = {
            "scope": ssa._get_scope(blocks),
            "varname": name,
            "defmap": assigned,
            "phimap": phis,
            "cfg": cfg,
            "phi_locations": ssa._compute_phi_locations(frontiers, assigned),
        }
        blocks.update(ssa._run_block_rewrite(part, states, handler))
        for label, found in phis.items():
            blocks[label].body = found + blocks[label].body
    return blocks


def _compute_live_map(
    cfg: Any, blocks: dict[int, Any], used: dict[int, set[str]], defined: dict[int, set[str]]
) -> dict[int, set[str]]:
    """The variables that must be alive at the entry of each block: used there or behind it, and defined before it."""
    names = sorted(set().union(*used.values(), *defined.values()))
    bit = {name: 1 << number for number, name in enumerate(names)}
    uses = {label: sum(bit[name] for name in used[label]) for label in blocks}
    definitions = {label: sum(bit[name] for name in defined[label]) for label in blocks}
    predecessors = {label: [before for before, _ in cfg.predecessors(label)] for label in blocks}
    known = {label: uses[label] | definitions[label] for label in blocks}  # at the end of a block
    is_changing = True
    while is_changing:
        is_changing = False
        for label, others in predecessors.items():
            for before in others:
                if known[before] & ~known[label]:
                    known[label] |= known[before]
                    is_changing = True
    live = uses
    is_changing = True
    while is_changing:
        is_changing = False
        for label in reversed(live):
            for before in predecessors[label]:
                if more := live[label] & known[before] & ~definitions[before] & ~live[before]:
                    live[before] |= more
                    is_changing = True
    return {label: {names[number] for number in _bits(live[label])} for label in blocks}


def _bits(number: int) -> Iterable[int]:
    """The places of a number's ones."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _post_process(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """`PostProcessor.run` without the variables at each block's entry, by which generators are compiled."""
    function = processor.func_ir
    assert not function.is_generator, f"{function.func_id.func_qualname}: a kernel is no generator"
    function.blocks = postproc.transforms.canonicalize_cfg(function.blocks)
    function.variable_lifetime = postproc.VariableLifetime(function.blocks)  # computes what it is asked for
    function.generator_info = None
    if emit_dels:
        processor._insert_var_dels(extend_lifetimes=extend_lifetimes)


def _resolver_of_calls() -> Callable[..., Any]:
    """`BaseContext.resolve_function_type`, which remembers the signatures of functions with positional arguments."""
    resolve = BaseContext.resolve_function_type
    known: dict[tuple[Any, ...], Any] = {}

    def resolve_function_type(context: Any, function: Any, arguments: Any, keywords: Any) -> Any:
        if keywords or not isinstance(function, BaseFunction):
            return resolve(context, function, arguments, keywords)
        key = id(context), function, tuple(arguments)
        if key not in known:
            known[key] = resolve(context, function, arguments, keywords)
        return known[key]

    return resolve_function_type
