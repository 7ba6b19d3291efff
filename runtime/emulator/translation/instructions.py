"""The table of PTX instructions: opcodes, modifiers, types, operands, and what emulates them (`forms.py`).

Rows of one opcode are tried in their order. Instructions whose operands depend on each other have a translation of
their own, and no more in their row.
"""

from __future__ import annotations

from runtime.emulator.arithmetic import conversions, floats, integers, moves, small_floats
from runtime.emulator.async_copies import bulk_copy, cp_async, tensor_copy
from runtime.emulator.memory import atomics, load_store
from runtime.emulator.synchronisation import cluster, control, mbarrier
from runtime.emulator.tensor_cores import mma, wgmma
from runtime.emulator.translation.forms import Form, Table

LONGER = "u32 s32 u64 s64"
WHOLE = f"u16 s16 {LONGER}"
BITS = "b16 b32 b64"
PAIRS = "f16 bf16 f16x2 bf16x2"
ROUNDED = "rn|rz|rm|rp"
SCOPES = "cta|cluster|gpu|sys"
OF_MBARRIER = "shared|shared::cta|shared::cluster? cta|cluster? release|acquire|relaxed? b64?"
MAY_WAIT = f"parity? {OF_MBARRIER}"
PUBLISHED = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release"

TABLE = Table(
    # integers
    Form("add sub", "cc?", LONGER, "d t t", integers.add),
    Form("add sub", "", "u16 s16", "d t t", integers.add),
    Form("addc subc", "cc?", LONGER, "d t t", integers.add),
    Form("min max", "", WHOLE, "d t t", integers.extremum),
    Form("mul", "lo|hi", WHOLE, "d t t", integers.multiply),
    Form("mul", "wide", "u16 s16 u32 s32", "d t t", integers.multiply),
    Form("mad", "lo|hi", "u16 s16", "d t t t", integers.multiply_add),
    Form("mad madc", "lo|hi cc?", LONGER, "d t t t", integers.multiply_add),
    Form("mad", "wide", "u16 s16 u32 s32", "d t t 2t", integers.multiply_add),
    Form("div rem", "", WHOLE, "d t t", integers.divide),
    Form("abs neg", "", "s16 s32 s64", "d t", integers.sign),
    Form("and or xor", "", f"pred {BITS}", "d t t", integers.logic),
    Form("not", "", f"pred {BITS}", "d t", lambda form, x: form.b.not_(x)),
    Form("shl", "", BITS, "d t u32", integers.shift),
    Form("shr", "", f"{BITS} {WHOLE}", "d t u32", integers.shift),
    Form("shf", "l|r clamp|wrap", "b32", "d t t t", integers.funnel_shift),
    Form("popc clz", "", "b32 b64", "d t", integers.count_bits),
    Form("bfind", "shiftamt?", LONGER, "d t", integers.find_leading),
    Form("brev", "", "b32 b64", "d t", integers.reverse),
    Form("bfe", "", LONGER, "d t u32 u32", integers.extract),
    Form("bfi", "", "b32 b64", "d t t u32 u32", integers.insert),
    Form("prmt", "", "b32", "d t t raw", integers.permute),
    # floats
    Form("add sub mul", f"{ROUNDED}? ftz? sat?", "f32", "d t t", floats.arithmetic),
    Form("add sub mul", f"{ROUNDED}?", "f64", "d t t", floats.arithmetic),
    Form("fma mad", f"{ROUNDED} ftz? sat?", "f32", "d t t t", floats.arithmetic),
    Form("fma mad", ROUNDED, "f64", "d t t t", floats.arithmetic),
    Form("div", "approx|full ftz?", "f32", "d t t", floats.approximation),
    Form("rcp sqrt rsqrt lg2 ex2", "approx ftz?", "f32", "d t", floats.approximation),
    Form("div", f"{ROUNDED} ftz?", "f32", "d t t", floats.arithmetic),
    Form("div", ROUNDED, "f64", "d t t", floats.arithmetic),
    Form("rcp sqrt", f"{ROUNDED} ftz?", "f32", "d t", floats.arithmetic),
    Form("rcp sqrt", ROUNDED, "f64", "d t", floats.arithmetic),
    Form("abs neg", "ftz?", "f32", "d t", floats.sign),
    Form("abs neg", "", "f64", "d t", floats.sign),
    Form("min max", "ftz? NaN?", "f32", "d t t", floats.extremum),
    Form("min max", "", "f64", "d t t", floats.extremum),
    Form("copysign", "", "f32 f64", "d b b", floats.copy_sign),
    Form("add sub mul", "rn? sat?", PAIRS, "d t t", small_floats.arithmetic),
    Form("fma", "rn? sat? relu?", PAIRS, "d t t t", small_floats.arithmetic),
    Form("cvt", lower=conversions.cvt),
    # comparisons, moves, exchanges of lanes
    Form("setp", lower=moves.setp),
    Form("selp", "", f"{BITS} {WHOLE} f32 f64", "d t t pred", moves.select),
    Form("mov", "", "pred", "d t", lambda form, x: x),
    Form("mov", lower=moves.move),
    Form("shfl", lower=moves.shfl),
    Form("vote", "sync all|any|uni", "pred", "d pred members", moves.vote),
    Form("vote", "sync ballot", "b32", "d pred members", moves.ballot),
    Form("redux", "sync add|min|max", "u32 s32", "d t members", moves.redux),
    Form("redux", "sync and|or|xor", "b32", "d t members", moves.redux),
    Form("activemask", "", "b32", "d", lambda form: form.low.splat(form.low.mask)),
    # memory
    Form("ld", lower=load_store.lower_load),
    Form("st", lower=load_store.lower_store),
    Form("cvta", lower=load_store.lower_cvta),
    Form("atom red", lower=atomics.lower_atomic),
    # control, barriers, fences
    Form("bra", lower=control.lower_branch),
    Form("brx.idx", lower=control.lower_branch_by_index),
    Form("ret exit", lower=control.lower_exit),
    Form("trap", lower=control.lower_trap),
    Form("brkpt", run="trap"),
    Form("nanosleep", "", "u32", "-", "sleep", blocks=True),
    Form("st.param", lower=control.lower_store_argument),
    Form("call", lower=control.lower_call),
    Form("bar.warp.sync", "", "", "members", "warp_barrier"),
    Form("bar barrier", lower=control.lower_barrier),
    Form("membar fence", lower=control.lower_fence),
    Form("fence.mbarrier_init.release.cluster", run="init_fence"),
    Form("fence.proxy.async", "shared::cta|shared::cluster?", run="proxy_fence"),
    Form("fence.proxy.async.global"),
    Form("fence.proxy.tensormap::generic.acquire", SCOPES, "", "- -", "tensor_map_acquire"),
    Form("fence.proxy.tensormap::generic.release", SCOPES),
    Form("griddepcontrol.wait", run="dependency_wait"),
    Form("griddepcontrol.launch_dependents"),
    Form("setmaxnreg", lower=cluster.lower_setmaxnreg),
    # clusters, mbarriers
    Form("barrier.cluster.arrive", "release|relaxed? aligned?", "", "aligned:1,relaxed:2", "cluster_arrive"),
    Form("barrier.cluster.wait", "acquire? aligned?", "", "aligned:1", "cluster_wait", blocks=True),
    Form("mapa", "shared::cluster?", "u32 u64", "d64 r64 r32", "map_rank"),
    Form("elect.sync", lower=cluster.lower_elect),
    Form("mbarrier.init", OF_MBARRIER, "", "[] r32", "mbarrier_init"),
    Form("mbarrier.inval", OF_MBARRIER, "", "[]", "mbarrier_inval"),
    Form("mbarrier.arrive mbarrier.arrive_drop", lower=mbarrier.lower_arrive),
    Form("mbarrier.expect_tx", OF_MBARRIER, "", "[] r32 =1", "mbarrier_transactions"),
    Form("mbarrier.complete_tx", OF_MBARRIER, "", "[] r32 =-1", "mbarrier_transactions"),
    Form("mbarrier.test_wait", MAY_WAIT, "", "dp [] r64 parity:1", "mbarrier_wait", blocks=True),
    Form("mbarrier.try_wait", MAY_WAIT, "", "dp [] r64 -? parity:1,try_wait:2", "mbarrier_wait", blocks=True),
    # asynchronous copies
    Form("cp.async.ca cp.async.cg", lower=cp_async.lower_cp_async),
    Form("cp.async.commit_group", run="cp_async_commit"),
    Form("cp.async.wait_all", "", "", "=-1", "cp_async_wait"),
    Form("cp.async.wait_group", "", "", "#", "cp_async_wait"),
    Form("cp.async.mbarrier.arrive", "noinc? shared|shared::cta? b64?", "", "[] noinc:1", "cp_async_arrive"),
    Form("cp.async.bulk.shared::cluster.global cp.async.bulk.shared::cta.global", lower=bulk_copy.lower_load),
    Form("cp.async.bulk.global.shared::cta cp.reduce.async.bulk.global.shared::cta", lower=bulk_copy.lower_store),
    Form("cp.async.bulk.commit_group", run="bulk_commit"),
    Form("cp.async.bulk.wait_group", "read?", "", "# read:1", "bulk_wait"),
    Form("cp.async.bulk.tensor cp.reduce.async.bulk.tensor", lower=tensor_copy.lower_tensor),
    Form("prefetch.tensormap", "", "", "[]", "tensor_map_prefetch"),
    Form("prefetch.global.L2 cp.async.bulk.prefetch.L2.global", "", "", "- -?"),
    Form("tensormap.replace.tile", lower=tensor_copy.lower_replace),
    Form(PUBLISHED, f"{SCOPES} sync aligned", "", "[] [] 128", "tensor_map_publish"),
    # tensor cores
    Form("mma.sync", lower=mma.lower_mma),
    Form("ldmatrix", lower=mma.lower_ldmatrix),
    Form("stmatrix", lower=mma.lower_stmatrix),
    Form("movmatrix.sync.aligned.m8n8.trans.b16", "", "", "d32 r32", "movmatrix"),
    Form("wgmma.mma_async", lower=wgmma.lower_mma_async),
    Form("wgmma.fence.sync.aligned", lower=wgmma.lower_fence),
    Form("wgmma.commit_group.sync.aligned", run="wgmma_commit"),
    Form("wgmma.wait_group.sync.aligned", lower=wgmma.lower_wait),
)
