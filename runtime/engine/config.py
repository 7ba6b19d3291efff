"""The engine's limits, and how many KV blocks it gets.

``EngineConfig`` is what the user asks for; ``resolve`` turns it, with the model's numbers, into the
``EngineLimits`` that the scheduler works with, or raises ``RequestError`` with the numbers that do not fit.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from runtime.engine.checks import check_one_of, check_positive, check_seconds, is_integer
from runtime.engine.errors import RequestError
from runtime.errors import InvalidArgumentError
from runtime.kv.kinds import FULL, AnyKind, blocks_of_sequence

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""Most bytes the KV cache takes unless the user names a size (never more than a quarter of free memory)."""

GPU_BATCHED_TOKENS, CPU_BATCHED_TOKENS = 2048, 512
"""Most tokens in a step unless the user says. On two cores a prompt of 2,000 tokens takes as long in steps of 512 as in
one, with 1 M weights and with 600 M; other streams stand still for a quarter of it."""

DEFAULT_MAX_WAITING_TOKENS = 4 << 20
"""Most prompt tokens in the waiting queue: a thousand requests of 4,096."""

POLICIES = ("fcfs", "priority", "deadline")
BATCHING = ("stall-free", "prefill-first", "orca", "static")
PREEMPTIONS = ("auto", "recompute", "swap")
VICTIMS = ("latest", "least-recently-used", "shortest-remaining")

Policy = Literal["fcfs", "priority", "deadline"]
Batching = Literal["stall-free", "prefill-first", "orca", "static"]
Preemption = Literal["auto", "recompute", "swap"]
Victim = Literal["latest", "least-recently-used", "shortest-remaining"]
Overlap = Literal["auto", "on", "off"]
DecodeGraphsMode = Literal["auto", "on", "off"]
DecodeKernels = Literal["layers", "megakernel"]
SpeculationAcceptance = Literal["exact", "rejection"]
Quantization = Literal["none", "int8", "int4", "mxfp4", "fp8"]
Activations = Literal["auto", "float"]
KVCacheDtype = Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"]
SPECULATIONS = ("auto", "off", "ngram", "suffix", "eagle3", "mtp")
DRAFT_PREFIX, EAGLE3_PREFIX, DFLASH_PREFIX = "draft:", "eagle3:", "dflash:"
OWN_DRAFTER = "drafter"
"""The folder in a model's that has a drafter for it."""

MOST_SPECULATIVE_TOKENS = 64
MOST_RANKS = 64
MOST_ENGINES = 64
LoadFormat = Literal["auto", "safetensors", "dummy"]
RoutingPolicy = Literal["round-robin", "least-load", "prefix-aware"]
ExecutorBackend = Literal["mp", "ray"]


class EngineSettings(TypedDict, total=False):
    """``EngineConfig``'s fields, as keyword arguments of whatever builds an engine; the defaults are there."""

    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    block_size: int
    num_blocks: int | None
    kv_cache_bytes: int | None
    max_waiting: int
    max_waiting_tokens: int
    seed: int | None
    scheduling_policy: Policy
    batching: Batching
    prefill_chunk: int | None
    prefill_chunk_stages: tuple[int, int, int, int] | None
    enable_prefix_caching: bool
    preemption: Preemption
    victim: Victim
    swap_space_bytes: int
    ageing_s: float
    ttft_target_s: float
    tpot_target_s: float
    exact: bool
    activations: Activations
    overlap: Overlap
    decode_graphs: DecodeGraphsMode
    decode: DecodeKernels
    device: str
    dtype: str
    load_format: LoadFormat
    quantization: Quantization
    kv_cache_dtype: KVCacheDtype
    kv_cache_dtype_skip_layers: str
    hf_overrides: str | dict[str, Any]
    speculation: str
    num_speculative_tokens: int
    speculation_acceptance: SpeculationAcceptance
    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layers: str
    data_parallel_size: int
    routing_policy: RoutingPolicy
    distributed_executor_backend: ExecutorBackend
    gemm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """The part of ``EngineConfig`` that the scheduler reads; see there."""

    policy: Policy = "priority"
    batching: Batching = "stall-free"
    prefill_chunk: int | None = None
    prefill_chunk_stages: tuple[int, int, int, int] | None = None
    preemption: Preemption = "auto"
    victim: Victim = "latest"
    ageing_s: float = 10.0
    ttft_target_s: float = 1.0
    tpot_target_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asks for. None: chosen from the model and the free memory.

    max_model_len           most tokens of prompt and output together; None: the model's positions, or what
                            the KV cache can hold if that is less
    max_num_seqs            most sequences in one step
    max_num_batched_tokens  most tokens in one step; None: 2,048 on a GPU, 512 on a cpu, whose products gain nothing
                            by more, or ``max_num_seqs`` if that is more
    block_size              tokens in one KV block
    num_blocks, kv_cache_bytes  size of the KV cache, one of the two
    max_waiting             most requests in the waiting queue
    max_waiting_tokens      most prompt tokens of all requests in the waiting queue; one request alone may have more
    seed                    of the generator that draws seeds for requests without one; None: from the OS
    scheduling_policy       "priority" (and arrival; the default), "fcfs", "deadline" (least slack first)
    batching                "stall-free" (decodes, then chunks of prompts; the default), and for comparison
                            "prefill-first", "orca", "static", which compute prompts whole
    prefill_chunk           most tokens of one prompt in one step; None: what the budget leaves
    prefill_chunk_stages    (high, low, stages, over_tokens): chunks that shrink in stages from high to low over the
                            first tokens of a prompt, in multiples of 32
    enable_prefix_caching   share the blocks of equal beginnings
    preemption              how a victim's content comes back: "recompute", "swap", or "auto": the cheaper by
                            measurement; without room in the swap space it is computed again
    victim                  whose blocks are taken: "latest" (the least urgent), "least-recently-used",
                            "shortest-remaining"
    swap_space_bytes        host memory for swapped sequences and for prefixes that the device had no room for
    ageing_s                seconds of waiting that one unit of priority is worth
    ttft_target_s, tpot_target_s  when tokens are due under "deadline", for requests that do not say
    exact                   the same tokens and log probabilities in any batch; rounding is a matter of ``activations``
    activations             "auto": on a cpu integers are multiplied with rows of x that are rounded to int8, on a GPU
                            long steps may be so where the checkpoint asks for it; "float": x is never rounded to bytes,
                            and weights that have no other product become floats while they are loaded
    overlap                 plan the next step while one runs: "on", "off", "auto" (on a GPU)
    decode_graphs           record decode steps as graphs and replay them: "on", "off", "auto" (on)
    decode                  what a graph of one sequence launches: kernels layer by layer ("layers"); "megakernel", one
                            for all layers, was slower and is refused
    device                  "auto", "cpu", "cuda", "cuda:1", "emulated", "emulated:sm_80" ...
    dtype                   of the weights: "auto" (as stored), "float32", "float16", "bfloat16"
    load_format             "auto" (as stored), "safetensors", or "dummy": random weights, by the seed
    quantization            of linear maps while they are loaded: "none", "int8", "int4" (groups of 32),
                            "mxfp4", "fp8"; the output head is int8 beside the latter three
    kv_cache_dtype          of the KV cache: "auto" (the weights'), "float32", "float16", "bfloat16", "int8", "fp8"; the
                            last two with a scale for each token and head
    kv_cache_dtype_skip_layers
                            layers whose pages stay in the weights' type: numbers and "sliding_window", by commas
    hf_overrides            fields of the model's config.json that others replace: an object, or its JSON; objects in it
                            are merged, and null makes a field absent, also one that is not known here
    speculation             who proposes tokens for decodes to try: "auto" (a request's prediction, where it has one),
                            "ngram" (beside it, what prompt and output said before), "suffix" (and the answers of others
                            of the same tenant), "draft:FOLDER" (a small model), "eagle3:FOLDER" (a drafter that reads
                            the model's hidden states), "eagle3" (the one in the model's folder), "dflash:FOLDER" (one
                            that says a block at once), "mtp" (the layer of the model's checkpoint that predicts further
                            tokens), "off" (nobody); tokens are as without (docs/speculation.md)
    num_speculative_tokens  most proposals for a sequence in a step; fewer, or none, where they do not pay
    speculation_acceptance  which proposals are kept: "exact" (those that equal the draw that would have come anyway: no
                            token changes), "rejection" (of a draft model's draws more: other answers, of the same
                            distribution; docs/speculation.md)
    tensor_parallel_size    ranks that the model is split over, each a process with a GPU, or with its share of the
                            processors; which numbers a model can be split by, docs/parallel.md tells
    pipeline_parallel_size  stages that have the model's layers one after another, each of ``tensor_parallel_size``
                            ranks; as many steps are under way at once (docs/parallel.md)
    pipeline_layers         how many layers each stage has, by commas; "": so that all read as many bytes
    data_parallel_size      engines that share the requests, each a process with the whole model; those of a machine
                            share its processors and its memory
    routing_policy          which of them gets a request: the next one ("round-robin"), the one with the least to do
                            ("least-load"), or with the least to do as its blocks hold the prompt's beginning
                            ("prefix-aware")
    distributed_executor_backend  who starts the engines' processes: this machine ("mp"), or Ray on its nodes ("ray")
    gemm                    the kernel of matrix products on a GPU: "auto", "naive", "tiled", "register", "tensor_core",
                            "hopper", "cublas"
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_waiting: int = 1024
    max_waiting_tokens: int = DEFAULT_MAX_WAITING_TOKENS
    seed: int | None = None
    scheduling_policy: Policy = "priority"
    batching: Batching = "stall-free"
    prefill_chunk: int | None = None
    prefill_chunk_stages: tuple[int, int, int, int] | None = None
    enable_prefix_caching: bool = True
    preemption: Preemption = "auto"
    victim: Victim = "latest"
    swap_space_bytes: int = 0
    ageing_s: float = 10.0
    ttft_target_s: float = 1.0
    tpot_target_s: float = 0.1
    exact: bool = False
    activations: Activations = "auto"
    overlap: Overlap = "auto"
    decode_graphs: DecodeGraphsMode = "auto"
    decode: DecodeKernels = "layers"
    device: str = "auto"
    dtype: str = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "none"
    kv_cache_dtype: KVCacheDtype = "auto"
    kv_cache_dtype_skip_layers: str = ""
    hf_overrides: Any = ""
    speculation: str = "auto"
    num_speculative_tokens: int = 7
    speculation_acceptance: SpeculationAcceptance = "exact"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_layers: str = ""
    data_parallel_size: int = 1
    routing_policy: RoutingPolicy = "prefix-aware"
    distributed_executor_backend: ExecutorBackend = "mp"
    gemm: str = "auto"

    def __post_init__(self) -> None:
        if self.hf_overrides != "":
            from models.configuration.overrides import as_text  # the help does without models

            try:
                object.__setattr__(self, "hf_overrides", as_text(self.hf_overrides))
            except InvalidArgumentError as error:
                raise RequestError(str(error), param="hf_overrides") from None
        for name in (
            "max_num_seqs", "block_size", "max_waiting", "max_waiting_tokens", "num_speculative_tokens",
            "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
        ):  # fmt: skip
            check_positive(name, getattr(self, name))
        for name, most in (
            ("tensor_parallel_size", MOST_RANKS), ("pipeline_parallel_size", MOST_RANKS),
            ("data_parallel_size", MOST_ENGINES),
        ):  # fmt: skip
            if getattr(self, name) > most:
                raise RequestError(f"{name} must be at most {most}, got {getattr(self, name)}", param=name)
        if self.num_ranks > MOST_RANKS:
            raise RequestError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size} of {self.tensor_parallel_size} ranks each: "
                f"all together must be at most {MOST_RANKS}",
                param="pipeline_parallel_size",
            )
        if self.pipeline_layers:
            counts = self.pipeline_layers.split(",")
            if len(counts) != self.pipeline_parallel_size or not all(
                each.isascii() and each.isdigit() and int(each) for each in counts
            ):
                raise RequestError(
                    f"pipeline_layers is {self.pipeline_layers!r:.80}, must be the layers of each of "
                    f"pipeline_parallel_size={self.pipeline_parallel_size} stages, at least 1",
                    param="pipeline_layers",
                )
        check_one_of("routing_policy", self.routing_policy, get_args(RoutingPolicy))
        check_one_of("distributed_executor_backend", self.distributed_executor_backend, get_args(ExecutorBackend))
        for name in ("max_num_batched_tokens", "max_model_len", "num_blocks", "kv_cache_bytes", "prefill_chunk"):
            if getattr(self, name) is not None:
                check_positive("kv_cache_memory_bytes" if name == "kv_cache_bytes" else name, getattr(self, name))
        if self.seed is not None and not is_integer(self.seed):
            raise RequestError(f"seed must be an integer or None, got {self.seed!r}", param="seed")
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise RequestError("give num_blocks or kv_cache_memory_bytes, not both", param="num_blocks")
        check_one_of("scheduling_policy", self.scheduling_policy, POLICIES)
        check_one_of("batching", self.batching, BATCHING)
        check_one_of("preemption", self.preemption, PREEMPTIONS)
        check_one_of("victim", self.victim, VICTIMS)
        check_one_of("overlap", self.overlap, ("auto", "on", "off"))
        check_one_of("decode_graphs", self.decode_graphs, ("auto", "on", "off"))
        check_one_of("decode", self.decode, get_args(DecodeKernels))
        if self.decode == "megakernel":
            raise RequestError(
                "decode is 'megakernel', which was removed: it took 1.42 ms for a step of Qwen3-0.6B on an H200 where"
                " decode 'layers' takes 0.81; use decode 'layers'",
                param="decode",
            )
        prefixes = DRAFT_PREFIX, EAGLE3_PREFIX, DFLASH_PREFIX
        if not isinstance(self.speculation, str) or self.speculation in ("", *prefixes):
            raise RequestError(
                f"speculation: draft:, eagle3: and dflash: need a folder, got {self.speculation!r:.80}",
                param="speculation",
            )
        if self.speculation not in SPECULATIONS and not self.speculation.startswith(prefixes):
            known = ", ".join((*SPECULATIONS, *(f"{prefix}FOLDER" for prefix in prefixes)))
            raise RequestError(
                f"speculation must be one of {known}, got {self.speculation!r:.80}",
                param="speculation",
            )
        if self.reads_hidden_states and self.num_ranks > 1:
            raise RequestError(
                f"speculation is {self.speculation!r:.80}: hidden states are not kept of a model that is split over"
                f" {self.num_ranks} ranks; leave out {self._split_by} or name another speculation",
                param="speculation",
            )
        if self.num_speculative_tokens > MOST_SPECULATIVE_TOKENS:
            raise RequestError(
                f"num_speculative_tokens must be at most {MOST_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}",
                param="num_speculative_tokens",
            )
        check_one_of("speculation_acceptance", self.speculation_acceptance, get_args(SpeculationAcceptance))
        if self.speculation_acceptance == "rejection" and (self.exact or self.num_ranks > 1):
            cause = "exact" if self.exact else f"{self._split_by} {getattr(self, self._split_by)}"
            why = "answers depend on what was proposed" if self.exact else "its ranks are not sent distributions"
            raise RequestError(
                f"speculation_acceptance is 'rejection', which does not go with {cause}: {why}",
                param="speculation_acceptance",
            )
        check_one_of("quantization", self.quantization, get_args(Quantization))
        check_one_of("activations", self.activations, get_args(Activations))
        check_one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        for name in ("enable_prefix_caching", "exact"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}", param=name)
        for name in ("ageing_s", "ttft_target_s", "tpot_target_s"):
            check_seconds(name, getattr(self, name))
        if not is_integer(self.swap_space_bytes) or self.swap_space_bytes < 0:
            raise RequestError(
                f"swap_space_bytes must be an integer, at least 0, got {self.swap_space_bytes!r}",
                param="swap_space_bytes",
            )
        if self.preemption == "swap" and self.swap_space_bytes == 0:
            raise RequestError("preemption='swap' needs swap_space_bytes", param="swap_space_bytes")
        self._check_chunks()

    def _check_chunks(self) -> None:
        given = [name for name in ("prefill_chunk", "prefill_chunk_stages") if getattr(self, name) is not None]
        if len(given) == 2:
            raise RequestError("give prefill_chunk or prefill_chunk_stages, not both", param="prefill_chunk")
        if given and self.batching != "stall-free":
            raise RequestError(
                f"{given[0]} cuts prompts, which batching={self.batching!r} computes whole", param=given[0]
            )
        stages = self.prefill_chunk_stages
        if stages is None:
            return
        if not isinstance(stages, tuple) or len(stages) != 4:
            raise RequestError(
                f"prefill_chunk_stages must be (high, low, stages, over_tokens), got {stages!r}",
                param="prefill_chunk_stages",
            )
        for value in stages:
            check_positive("prefill_chunk_stages", value)
        high, low, _, _ = stages
        if high % 32 or low % 32 or low > high:
            raise RequestError(
                f"prefill_chunk_stages: high={high} and low={low} must be multiples of 32, low not above high",
                param="prefill_chunk_stages",
            )

    @property
    def num_ranks(self) -> int:
        """Of all stages together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def _split_by(self) -> str:
        return "tensor_parallel_size" if self.tensor_parallel_size > 1 else "pipeline_parallel_size"

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """``pipeline_layers`` as numbers."""
        return tuple(int(each) for each in self.pipeline_layers.split(",")) if self.pipeline_layers else ()

    @property
    def most_open_steps(self) -> int:
        """Steps that are open at once: one a stage. Where tokens are proposed, which takes the step before, one."""
        proposes = self.speculation not in ("auto", "off")
        return 1 if proposes else self.pipeline_parallel_size

    @property
    def draft_model(self) -> str | None:
        """The folder of the model that proposes tokens, if one does."""
        return self.speculation[len(DRAFT_PREFIX) :] if self.speculation.startswith(DRAFT_PREFIX) else None

    @property
    def reads_hidden_states(self) -> bool:
        """Whether what proposes tokens reads the model's hidden states."""
        return self.speculation in ("eagle3", "mtp") or self.speculation.startswith((EAGLE3_PREFIX, DFLASH_PREFIX))

    @property
    def scheduling(self) -> SchedulingConfig:
        values: dict[str, Any] = {each.name: getattr(self, each.name, None) for each in fields(SchedulingConfig)}
        return SchedulingConfig(**{**values, "policy": self.scheduling_policy})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The numbers the engine runs with. One request at ``max_model_len`` always fits ``num_blocks``, and
    every running sequence can decode in each step: ``max_num_seqs <= max_num_batched_tokens``.
    ``num_host_blocks`` is the swap space in blocks, ``cache_kinds`` the kind of each cache group;
    ``rotary_switch`` as the model has it, None where no sequence can be longer. ``most_whole`` tokens of pictures that
    may not be cut fit a step and the pool; None: there are none such."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    max_waiting: int
    max_waiting_tokens: int = DEFAULT_MAX_WAITING_TOKENS
    scheduling: SchedulingConfig = SchedulingConfig()
    enable_prefix_caching: bool = True
    num_host_blocks: int = 0
    cache_kinds: tuple[AnyKind, ...] = (FULL,)
    rotary_switch: int | None = None
    most_whole: int | None = None
    exact: bool = False
    overlap: Overlap = "auto"
    decode_graphs: DecodeGraphsMode = "auto"


def resolve(
    config: EngineConfig,
    *,
    max_position_embeddings: int,
    bytes_per_block: int,
    draft_bytes_per_block: int = 0,
    available_bytes: int,
    is_gpu: bool = False,
    has_own_memory: bool = False,
    cache_kinds: tuple[AnyKind, ...] = (FULL,),
    rotary_switch: int | None = None,
    whole_tokens: int | None = None,
) -> EngineLimits:
    """The limits for a model with this many positions, this many bytes in one KV block (all layers of a cache group),
    these kinds of its cache groups, and this ``rotary_switch``.

    ``whole_tokens``: those of a picture, which one step computes, beside the decodes of all other sequences; None:
    pictures may be cut. ``draft_bytes_per_block``: what a draft model keeps beside each block, out of the same memory.
    ``available_bytes`` are free on the device; ``has_own_memory`` says that they are a GPU's own, of which the KV cache
    may take nine tenths unless the user names a size: not those of an emulated one (``is_gpu``).

    Raises ``RequestError`` when ``max_model_len`` exceeds the model's positions, a picture what a step computes, or a
    KV cache whose size the user names what is free, and when that cannot hold one request of that length.
    """
    block_size = config.block_size
    num_host_blocks = config.swap_space_bytes // bytes_per_block
    bytes_per_block += draft_bytes_per_block
    max_num_batched_tokens = config.max_num_batched_tokens
    if max_num_batched_tokens is None:
        max_num_batched_tokens = max(GPU_BATCHED_TOKENS if is_gpu else CPU_BATCHED_TOKENS, config.max_num_seqs)
        if whole_tokens is not None:
            max_num_batched_tokens = max(max_num_batched_tokens, whole_tokens + config.max_num_seqs - 1)
    max_num_seqs = min(config.max_num_seqs, max_num_batched_tokens)
    most_whole = max_num_batched_tokens - max_num_seqs + 1
    if whole_tokens is not None and whole_tokens > most_whole:
        raise RequestError(
            f"max_num_batched_tokens={max_num_batched_tokens} is below {whole_tokens + max_num_seqs - 1}: one step "
            f"computes a picture's {whole_tokens} tokens beside the decodes of max_num_seqs={max_num_seqs} less 1",
            param="max_num_batched_tokens",
        )
    if config.max_model_len is not None and config.max_model_len > max_position_embeddings:
        raise RequestError(
            f"max_model_len={config.max_model_len} exceeds the model's {max_position_embeddings} positions",
            param="max_model_len",
        )
    wanted_len = config.max_model_len or max_position_embeddings
    chunk = (whole_tokens or 1) if config.batching == "stall-free" else None  # the others compute prompts whole

    def blocks_for(num_tokens: int) -> int:
        return blocks_of_sequence(num_tokens, cache_kinds, block_size, chunk=chunk)

    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // bytes_per_block
    else:
        if has_own_memory:
            budget = available_bytes * 9 // 10
        else:
            num_engines = config.data_parallel_size if config.distributed_executor_backend == "mp" else 1
            budget = min(DEFAULT_KV_CACHE_BYTES, available_bytes // 4 // num_engines)
        chunks = -(-max_num_batched_tokens // block_size) * sum(not kind.is_whole for kind in cache_kinds)
        most = config.max_num_seqs * blocks_for(wanted_len) + 2 * chunks  # of a step that runs, and of the next
        num_blocks = min(budget // bytes_per_block, most)
    if num_blocks * bytes_per_block > available_bytes:
        raise RequestError(
            f"a KV cache of {num_blocks} blocks takes {num_blocks * bytes_per_block:,} bytes, but only "
            f"{available_bytes:,} are free on the device: lower kv_cache_memory_bytes or num_blocks",
            param="num_blocks" if config.num_blocks is not None else "kv_cache_memory_bytes",
        )
    max_model_len = wanted_len
    if num_blocks < blocks_for(wanted_len):
        max_model_len = bisect_right(range(wanted_len), num_blocks, key=blocks_for) - 1
        max_model_len -= max_model_len % block_size
        if config.max_model_len is not None or max_model_len < 1:
            length = -(-wanted_len // block_size) * block_size if config.max_model_len is not None else block_size
            needed = blocks_for(length)
            raise RequestError(
                f"a request of {length} tokens needs {needed} KV blocks of {block_size} tokens "
                f"({needed * bytes_per_block:,} bytes), but the KV cache has {num_blocks}: lower "
                "max_model_len or raise kv_cache_memory_bytes",
                param="kv_cache_memory_bytes",
            )
    if whole_tokens is not None and chunk is not None:
        most_whole = bisect_right(
            range(most_whole + 1), num_blocks,
            key=lambda count: blocks_of_sequence(max_model_len, cache_kinds, block_size, chunk=max(chunk, count)),
        ) - 1  # fmt: skip
    return EngineLimits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        scheduling=config.scheduling,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        cache_kinds=cache_kinds,
        rotary_switch=rotary_switch if rotary_switch is not None and max_model_len > rotary_switch else None,
        most_whole=None if whole_tokens is None else most_whole,
        exact=config.exact,
        overlap=config.overlap,
        decode_graphs=config.decode_graphs,
    )


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be taken without swapping (an estimate; the cgroup's limit counts, and what files
    that were read hold of it does not: a model's weights lie there after they were packed). ``root`` holds proc and
    sys."""
    meminfo = root / "proc/meminfo"
    available = 0
    if meminfo.exists():
        available = 1024 * _field(meminfo, "MemAvailable:")
    if available == 0:  # not Linux: half of what is installed
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = root / "sys/fs/cgroup"
    limit, used, parts = group / "memory.max", group / "memory.current", group / "memory.stat"
    if limit.exists() and used.exists() and (text := limit.read_text(encoding="utf-8").strip()) != "max":
        reclaimable = _field(parts, "inactive_file") if parts.exists() else 0
        available = min(available, max(0, int(text) - int(used.read_text(encoding="utf-8")) + reclaimable))
    return available


def _field(file: Path, name: str) -> int:
    """The number behind `name` in a file of lines of names and numbers; 0 without such a line."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.split(maxsplit=1)[:1] == [name]:
            return int(line.split()[1])
    return 0
