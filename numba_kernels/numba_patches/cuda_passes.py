"""Replacements of passes in Numba's front end that take time quadratic in a kernel's size, with the same results.

Numba inlines a kernel's device functions (`intrinsics.device`), which makes it long, and then goes over all of it again
for each call, each variable, each operator. Inside `cuda_passes` a kernel compiles in less than half the time:

    run_untyped_passes     a device function is read once, not once a call
    inline_ir              inlined code is copied once, and shares its immutable parts
    list_vars              an instruction's variables, found by the types of its fields
    _run_ssa               a variable's versions are sought in the blocks that name it
    compute_live_map       sets of variables are bits of a number
    PostProcessor.run      the parts for generators are left out
    resolve_function_type, get_call_type
                           a call is typed once for each function and types of arguments
    get_function           a call's lowering is sought once
    resolve_value_type     a constant is typed once, and a type measured once (get_abi_sizeof)
    fixup_var_define_in_scope
                           each scope is completed once, not once a block
    _find_singly_assigned  assignments are counted once, not once a variable
    str                    instructions are not written out for a trace that is never read
    refresh                registries are gone through only when one has grown
    new_error_context      a plain object, where a generator takes three times as long to enter and leave

A test compiles kernels with and without them: the PTX is the same.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numba.cuda.lowering as lowering
from llvmlite.ir import IdentifiedStructType
from numba.core.types import BaseFunction
from numba.cuda.core import analysis, errors, inline_closurecall, ir, ir_utils, postproc, ssa, typeinfer, untyped_passes
from numba.cuda.core.base import BaseContext as LoweringContext
from numba.cuda.core.bytecode import FunctionIdentity
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.core.targetconfig import ConfigStack
from numba.cuda.target import CUDATypingContext
from numba.cuda.typing.context import BaseContext

from numba_kernels.numba_patches.host_passes import post_processing, variable_listers
from numba_kernels.numba_patches.patching import is_known, replaced


@contextmanager
def cuda_passes() -> Iterator[None]:
    """Kernels that are compiled inside are compiled by this module's passes. Other threads' compilations wait."""
    if not is_known("numba-cuda"):
        yield
        return
    with global_compiler_lock:
        parts = [
            (inline_closurecall.InlineWorker, "run_untyped_passes", _reader_of_functions()),
            (inline_closurecall.InlineWorker, "inline_ir", _inliner()),
            *variable_listers(ir, ir.var_types, ir.inst_types),
            (ssa, "_run_ssa", _run_ssa),
            (analysis, "compute_live_map", _compute_live_map),
            post_processing(postproc),
            (BaseContext, "resolve_function_type", _resolver_of_calls()),
            (BaseFunction, "get_call_type", _typer_of_calls()),
            (LoweringContext, "get_function", _finder_of_implementations()),
            (CUDATypingContext, "resolve_value_type", _typer_of_values()),
            (LoweringContext, "get_abi_sizeof", _measurer_of_types()),
            (untyped_passes, "fixup_var_define_in_scope", _complete_scopes),
            (lowering.Lower, "_find_singly_assigned_variable", _find_singly_assigned_variable),
            (lowering, "str", lambda instruction: ""),
            (LoweringContext, "refresh", _refresher()),
            (lowering, "new_error_context", _ErrorContext),
            (typeinfer, "new_error_context", _ErrorContext),
        ]
        with replaced(parts):
            yield


@functools.cache
def _functions_read() -> dict[Any, Any]:
    """The IR of each device function that any kernel has called: functions of modules and of cached factories."""
    return {}


def _reader_of_functions() -> Callable[..., Any]:
    """`InlineWorker.run_untyped_passes`, which reads each function once. Callers copy its IR before inlining."""
    read = inline_closurecall.InlineWorker.run_untyped_passes
    known = _functions_read()

    def run_untyped_passes(worker: Any, function: Any, enable_ssa: bool = False) -> Any:
        if (function, enable_ssa) not in known:
            known[function, enable_ssa] = read(worker, function, enable_ssa)
        worker.flags.enable_ssa = enable_ssa
        found = known[function, enable_ssa].copy()
        identity = copy.copy(found.func_id)  # a number of its own, which names the variables of this call
        identity.unique_id = next(FunctionIdentity._unique_ids)
        identity.unique_name = f"{identity.func_qualname}${identity.unique_id}"
        found.func_id = identity
        return found

    return run_untyped_passes


def _inliner() -> Callable[..., Any]:
    """`InlineWorker.inline_ir` of code without types: one copy, with variables renamed on the way."""
    inline = inline_closurecall.InlineWorker.inline_ir

    def inline_ir(
        worker: Any, caller: Any, block: Any, place: int, callee: Any, free: Any, arg_typs: Any = None
    ) -> Any:
        if worker._permit_update_type_and_call_maps:
            return inline(worker, caller, block, place, callee, free, arg_typs=arg_typs)
        if worker.validator is not None:
            worker.validator(callee)
        scope, statement = block.scope, block.body[place]
        first = max(ir_utils._the_max_label.next(), max(caller.blocks)) + 1
        (callee_scope,) = {id(each.scope): each.scope for each in callee.blocks.values()}.values()
        renamed = {
            variable.name: scope.redefine(
                inline_closurecall._created_inlined_var_name(callee.func_id.unique_name, variable.name),
                loc=variable.loc,
            )
            for variable in tuple(callee_scope.localvars._con.values())
            if variable.name not in free
        }
        copied = {label: _copy_of_block(each, renamed) for label, each in callee.blocks.items()}
        blocks = inline_closurecall.simplify_CFG(inline_closurecall.add_offset_to_labels(copied, first))
        entry = min(blocks)
        ir_utils._the_max_label.update(max(blocks))
        arguments = inline_closurecall._get_callee_args(statement.value, callee.func_id.func, statement.loc, caller)
        inline_closurecall._replace_args_with(blocks, arguments)
        rest = ir.Block(scope, block.loc)
        rest.body = block.body[place + 1 :]
        rest_label = inline_closurecall.next_label()
        caller.blocks[rest_label] = rest
        block.body = [*block.body[:place], ir.Jump(entry, statement.loc)]
        order = inline_closurecall.find_topo_order(blocks)
        inline_closurecall._replace_returns(blocks, statement.target, rest_label)
        definitions = caller._definitions
        if statement.value in definitions.get(statement.target.name, ()):
            definitions[statement.target.name].remove(statement.value)
        for label in order:
            blocks[label].scope = scope
            inline_closurecall._add_definitions(caller, blocks[label])
            caller.blocks[label] = blocks[label]
        return callee, blocks, renamed, [(rest_label, rest), *((label, blocks[label]) for label in order)]

    return inline_ir


def _copy_of_block(block: Any, renamed: dict[str, Any]) -> Any:
    """A block with statements of its own, in the same scope."""
    made = ir.Block(block.scope, block.loc)
    made.body = [_copy_of(statement, renamed) for statement in block.body]
    return made


def _copy_of(node: Any, renamed: dict[str, Any]) -> Any:
    """A statement, or what it holds, with other variables. Places, constants and values are the same."""
    kind = type(node)
    if issubclass(kind, ir.var_types):
        return renamed.get(node.name, node)
    if issubclass(kind, ir.inst_types):
        made = object.__new__(kind)
        for name, value in node.__dict__.items():
            made.__dict__[name] = _copy_of(value, renamed)
        return made
    if kind is dict:
        return {name: _copy_of(value, renamed) for name, value in node.items()}
    if kind is list or kind is tuple:
        return kind([_copy_of(value, renamed) for value in node])
    return node


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
    """The variables that must be alive at the entry of each block: used there or later, and defined before."""
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


@functools.cache
def _calls_typed() -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """The signature of each call that any kernel has made, with its lowering, by the compilation's options."""
    return {}


def _typer_of_calls() -> Callable[..., Any]:
    """`BaseFunction.get_call_type`, which remembers the signatures of functions with positional arguments."""
    typed: Any = BaseFunction.get_call_type
    known = _calls_typed()
    words: dict[int, tuple[str, Any]] = {}

    def get_call_type(function: Any, context: Any, arguments: Any, keywords: Any) -> Any:
        if keywords:
            return typed(function, context, arguments, keywords)
        flags = ConfigStack.top_or_none()
        if id(flags) not in words:
            words[id(flags)] = repr(flags), flags
        key = id(function), id(context), words[id(flags)][0], tuple(arguments)
        if key not in known:
            signature = typed(function, context, arguments, keywords)
            known[key] = signature, function._impl_keys[signature.args], function, context
        signature, implementation = known[key][:2]
        function._impl_keys[signature.args] = implementation
        return signature

    return get_call_type


def _finder_of_implementations() -> Callable[..., Any]:
    """`BaseContext.get_function` of lowering, which remembers its results."""
    find = LoweringContext.get_function
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def get_function(context: Any, function: Any, signature: Any, _firstcall: bool = True) -> Any:
        if not isinstance(function, BaseFunction):
            return find(context, function, signature, _firstcall)
        implementation = function.get_impl_key(signature.as_function())
        key = id(context), id(function), id(implementation), signature.args, signature.return_type
        if key not in known:
            known[key] = find(context, function, signature, _firstcall), context, function, implementation
        return known[key][0]

    return get_function


def _refresher() -> Callable[..., Any]:
    """`BaseContext.refresh` of lowering: nothing while no registry that it and its typing context know has grown."""
    refresh = LoweringContext.refresh
    seen: dict[int, tuple[Any, int]] = {}

    def size(context: Any) -> int:
        lists = (each for registry in context._registries for each in vars(registry).values() if type(each) is list)
        return sum(map(len, lists))

    def refresh_if_grown(context: Any) -> None:
        if seen.get(id(context)) != (context, size(context) + size(context.typing_context)):
            refresh(context)
            seen[id(context)] = context, size(context) + size(context.typing_context)

    return refresh_if_grown


class _ErrorContext:
    """`errors.new_error_context`: adds a line to errors of Numba that are raised inside."""

    __slots__ = ("arguments", "named", "words")

    def __init__(self, words: str, *arguments: Any, **named: Any) -> None:
        self.words, self.arguments, self.named = words, arguments, named
        loc = named.get("loc")
        if loc is not None and not loc.filename.startswith(errors._numba_path):
            errors.loc_info.update(named)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, errors.NumbaError):
            error.add_context(self.words.format(*self.arguments, **self.named))


def _typer_of_values() -> Callable[..., Any]:
    """`CUDATypingContext.resolve_value_type`, which remembers the types of whole numbers and of functions."""
    resolve = CUDATypingContext.resolve_value_type
    known: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def resolve_value_type(context: Any, value: Any) -> Any:
        kind = type(value)
        if kind is int or kind is bool:
            key: tuple[Any, ...] = (kind, value)
        elif callable(value):
            key = (id(context), id(value))
        else:
            return resolve(context, value)
        if key not in known:
            known[key] = resolve(context, value), value
        return known[key][0]

    return resolve_value_type


@functools.cache
def _sizes_of_types() -> dict[tuple[int, str], tuple[int, Any]]:
    return {}


def _measurer_of_types() -> Callable[..., Any]:
    """`BaseContext.get_abi_sizeof` of lowering, which has LLVM read a module for each question."""
    measure = LoweringContext.get_abi_sizeof
    known = _sizes_of_types()

    def get_abi_sizeof(context: Any, kind: Any) -> Any:
        if isinstance(kind, IdentifiedStructType):  # the text lacks its contents
            return measure(context, kind)
        key = id(context), str(kind)
        if key not in known:
            known[key] = measure(context, kind), context
        return known[key][0]

    return get_abi_sizeof


def _complete_scopes(blocks: dict[int, Any]) -> None:
    """`fixup_var_define_in_scope`: every scope has the variables of all blocks."""
    used = {
        variable.name: variable for block in blocks.values() for each in block.body for variable in each.list_vars()
    }
    for scope in {id(block.scope): block.scope for block in blocks.values()}.values():
        for name, variable in used.items():
            if name not in scope.localvars:
                scope.localvars.define(name, variable)


def _find_singly_assigned_variable(lowering: Any) -> None:
    """`Lower._find_singly_assigned_variable`, which counts the assignments of all variables at once."""
    blocks = lowering.func_ir.blocks
    uses = analysis.compute_use_defs(blocks)
    elsewhere = set().union(*uses.usemap.values(), analysis.must_use_alloca(blocks))
    defining = Counter(name for names in uses.defmap.values() for name in names)
    assigned: Counter[str] = Counter()
    for label, block in blocks.items():
        names = uses.defmap[label]
        assigned.update(each.target.name for each in block.find_insts(ir.assign_types) if each.target.name in names)
    lowering._singly_assigned_vars = {
        name for name, count in defining.items() if count == 1 and assigned[name] == 1 and name not in elsewhere
    }
    lowering._blk_local_varmap = {}


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
