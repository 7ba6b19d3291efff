"""Replacements of parts of Numba that are not public, to compile faster. The results are those of Numba's own parts.

    patch         written for              replaces                                  without it
    host_passes   numba 0.68               passes over host code                     a third more time
    linked_parts  numba 0.68               how functions that a kernel calls are     two to three times the time
                                           made ready
    cuda_passes   numba-cuda 0.30.4        passes over kernels of GPUs               more than twice the time

A patch is a context: Numba has its own parts again after it. For any other version a patch does nothing: code
compiles by Numba's own parts, and one line of the log says so (`patching.is_known`). Tests compile code with each patch
and without it, and compare; with the next version in `VERSIONS` they say whether a patch still holds.

Upstream would have to take: variables of an instruction by the types of its fields (`list_vars`); signatures
remembered by function and types of arguments (`get_call_type`, `resolve_function_type`); functions that are linked
into others without being optimised or wrapped for Python first; single assignment, live variables and scopes in linear
time; no text of each instruction unless it is traced.
"""
