"""The options of an engine: each one once, with its type, default, bounds and words.

``runtime.engine.limits`` turns an ``EngineConfig``, with the model's numbers, into what the scheduler works with.
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args

from runtime.engine.checks import check_positive
from runtime.engine.errors import RequestError
from runtime.engine.option import Flag, Option, check_options, describe, option_fields
from runtime.errors import InvalidArgumentError
from runtime.later import later

_overrides = later("models.configuration.overrides")  # the help does without models
_processors = later("runtime.engine.logits.processors")

DEFAULT_MAX_WAITING_TOKENS = 4 << 20
"""Most prompt tokens in the waiting queue: a thousand requests of 4,096."""

Policy = Literal["fcfs", "priority", "deadline", "fair"]
Batching = Literal["stall-free", "prefill-first", "orca", "static"]
Preemption = Literal["auto", "recompute", "swap"]
Victim = Literal["latest", "least-recently-used", "shortest-remaining"]
POLICIES, BATCHING, PREEMPTIONS, VICTIMS = map(get_args, (Policy, Batching, Preemption, Victim))
Overlap = Literal["auto", "on", "off"]
DecodeGraphsMode = Literal["auto", "on", "off"]
DecodeKernels = Literal["layers", "megakernel"]
SpeculationAcceptance = Literal["exact", "rejection"]
Quantization = Literal["none", "int8", "int4", "mxfp4", "fp8"]
Activations = Literal["auto", "float"]
KVCacheDtype = Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"]
SPECULATIONS = ("auto", "off", "ngram", "suffix", "eagle3", "mtp")
DRAFT_PREFIX, EAGLE3_PREFIX, DFLASH_PREFIX, MTP_PREFIX = "draft:", "eagle3:", "dflash:", "mtp:"
OWN_DRAFTER = "drafter"
"""The folder in a model's that has a drafter for it."""

MOST_SPECULATIVE_TOKENS = 64
MOST_RANKS = 64
MOST_ENGINES = 64
LoadFormat = Literal["auto", "safetensors", "dummy"]
RoutingPolicy = Literal["round-robin", "least-load", "prefix-aware"]
EngineRoles = Literal["fixed", "auto"]
ExecutorBackend = Literal["mp", "ray"]
TransferLibrary = Literal["tcp", "nixl"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
GIB = 1 << 30


def _stages_of_text(text: str) -> tuple[int, ...]:
    return integers("prefill_chunk_stages", text)


def _names_of_text(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",")) if text else ()  # the flag's own default is no text


def bytes_of_gib(gib: float) -> int:
    return round(gib * GIB)


def gib_of_bytes(count: int | None) -> float | None:
    return None if count is None else count / GIB


def _on_or_off(value: bool) -> Overlap:
    return "on" if value else "off"


def _unless_auto(value: Overlap) -> bool | None:
    return None if value == "auto" else value == "on"


def integers(name: str, text: str) -> tuple[int, ...]:
    """``"32,256"`` → ``(32, 256)``. Raises `RequestError` with the option's name."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"{name} must be integers with commas between them, got {text!r:.80}", param=name) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """The options that the scheduler reads."""

    scheduling_policy: Annotated[
        Policy,
        Option(
            help="Order of requests: by arrival, by priority and arrival, by least slack, or fair shares of tenants.",
            about='"priority" (and arrival), "fcfs", "deadline" (least slack first), "fair" (shares of tenants)',
            heading="Scheduling",
        ),
    ] = "priority"
    batching: Annotated[
        Batching,
        Option(
            help="How prompts and decodes share steps; all but stall-free are for comparison.",
            about='"stall-free"; to compare, "prefill-first", "orca", "static"',
            heading="Scheduling",
        ),
    ] = "stall-free"
    prefill_chunk: Annotated[
        int | None,
        Option(
            help="Most tokens of one prompt in one step; default: what the budget leaves.",
            about="most tokens of one prompt in one step; default: what the budget leaves",
            heading="Scheduling",
        ),
    ] = None
    prefill_chunk_stages: Annotated[
        tuple[int, int, int, int] | None,
        Option(
            help="Chunks that shrink from HIGH to LOW in STAGES over a prompt's first TOKENS.",
            about="(high, low, stages, over_tokens): shrinking chunks of a prompt's first tokens",
            heading="Scheduling",
            flag=Flag(kind=str, metavar="HIGH,LOW,STAGES,TOKENS", read=_stages_of_text),
        ),
    ] = None
    preemption: Annotated[
        Preemption,
        Option(
            help="How a preempted sequence's content comes back; auto: the cheaper.",
            about='how a victim comes back: "recompute", "swap", or "auto": the cheaper by measurement',
            heading="Scheduling",
        ),
    ] = "auto"
    victim: Annotated[
        Victim,
        Option(
            help="Sequence that is preempted when blocks are missing.",
            about='whose blocks are taken: "latest", "least-recently-used", "shortest-remaining"',
            heading="Scheduling",
        ),
    ] = "latest"
    ageing_s: Annotated[
        float,
        Option(
            help="Seconds of waiting that one unit of priority is worth.",
            heading="Scheduling",
            flag=Flag(name="ageing"),
        ),
    ] = 10.0
    ttft_target_s: Annotated[
        float,
        Option(
            help="Seconds to the first token, for the deadline policy and engines that take either role.",
            about='seconds to the first token under "deadline", unless a request has its own, and for `engine_roles`',
            heading="Scheduling",
            flag=Flag(name="ttft_target"),
        ),
    ] = 1.0
    tpot_target_s: Annotated[
        float,
        Option(
            help="Seconds to each next token, for the deadline policy and engines that take either role.",
            about='seconds to each next token under "deadline", and for `engine_roles`',
            heading="Scheduling",
            flag=Flag(name="tpot_target"),
        ),
    ] = 0.1
    output_token_cost: Annotated[
        float,
        Option(
            help="Cost of an output token in fair shares; that of a computed prompt token is 1.",
            about='cost of an output token under "fair"; that of a computed prompt token is 1',
            heading="Scheduling",
            below=1e6,
            must_be="a number above 0 and below 1,000,000",
        ),
    ] = 2.0
    cached_token_cost: Annotated[
        float,
        Option(
            help="Cost of a prompt token from the prefix cache in fair shares.",
            heading="Scheduling",
            least=0,
            below=1e6,
            must_be="a number from 0, below 1,000,000",
        ),
    ] = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulingConfig):
    """An engine's options. With None the engine chooses by the model and the free memory. Raises ``RequestError``."""

    device: Annotated[
        str,
        Option(
            help="auto, cpu, cuda[:N], or emulated[:sm_80|sm_90a|sm_120a].",
            about='"auto", "cpu", "cuda", "cuda:1", "emulated", "emulated:sm_80" ...',
            heading="Model",
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Option(
            help="Type of the weights; auto: as stored.",
            about='type of the weights: "auto" (as stored), "float32", "float16", "bfloat16"',
            heading="Model",
            flag=Flag(kind=Literal["auto", "float32", "float16", "bfloat16"]),
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Option(
            help="Format that the weights get while they are loaded.",
            about='format that linear maps get at load: "none", "int8", "int4" (groups of 32), "mxfp4", "fp8"',
            heading="Model",
        ),
    ] = "none"
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Option(
            help="Type of the KV cache; auto: the weights', of GGUF blocks bfloat16. int8, fp8: a byte a number.",
            about='"auto" (the weights\', of GGUF blocks bfloat16), "float32", "float16", "bfloat16", "int8", "fp8"',
            heading="Model",
        ),
    ] = "auto"
    state_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Option(
            help="Type of recurrent states; bfloat16 takes half the memory and rounds after each token.",
            about='type of recurrent states: "float32", or "bfloat16", which takes half the memory',
            heading="Model",
        ),
    ] = "float32"
    kv_cache_dtype_skip_layers: Annotated[
        str,
        Option(
            help="Layers whose pages stay in the weights' type: numbers and sliding_window, by commas.",
            heading="Model",
        ),
    ] = ""
    hf_overrides: Annotated[
        Any,
        Option(
            help="Fields of the model's config.json to replace; null removes one.",
            about=(
                "fields that replace those of config.json: an object, or its JSON; objects in it are merged, null "
                "makes a field absent"
            ),
            heading="Model",
            flag=Flag(kind=str, metavar="JSON"),
        ),
    ] = ""
    mmproj: Annotated[
        str,
        Option(
            help="The tower of a GGUF model that reads pictures; none: text alone; default: mmproj*.gguf beside it.",
            about=(
                'GGUF file of a GGUF model\'s vision tower; "none" reads text alone; by default a fitting '
                "mmproj*.gguf beside the model"
            ),
            heading="Model",
            flag=Flag(kind=str, metavar="FILE"),
        ),
    ] = ""
    max_model_len: Annotated[
        int | None,
        Option(
            help="Most tokens of prompt and answer together; default: the model's.",
            about="most tokens of prompt and output; default: the model's positions, or what the cache holds",
            heading="Memory and batches",
        ),
    ] = None
    max_num_seqs: Annotated[
        int,
        Option(
            help="Most sequences in one step.",
            heading="Memory and batches",
        ),
    ] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            help="Most tokens in one step; default: 2048 on a GPU, 512 on a cpu.",
            about="most tokens in one step; default: 2,048 on a GPU, 512 on a CPU, at least `max_num_seqs`",
            heading="Memory and batches",
        ),
    ] = None
    block_size: Annotated[
        int,
        Option(
            help="Tokens in one KV block.",
            heading="Memory and batches",
        ),
    ] = 16
    num_blocks: Annotated[
        int | None,
        Option(
            about="blocks of the KV cache, instead of `kv_cache_bytes`",
        ),
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        Option(
            help="Bytes of the KV cache; default: by free memory.",
            about="bytes of the KV cache; by default free memory decides",
            heading="Memory and batches",
            known_as="kv_cache_memory_bytes",
            flag=Flag(declarations=("--kv-cache-memory-bytes", "--kv-cache-bytes")),
        ),
    ] = None
    max_waiting: Annotated[
        int,
        Option(
            about="most requests in the waiting queue",
        ),
    ] = 1024
    max_waiting_tokens: Annotated[
        int,
        Option(
            about="most prompt tokens in the waiting queue, but for one request alone",
        ),
    ] = DEFAULT_MAX_WAITING_TOKENS
    load_format: Annotated[
        LoadFormat,
        Option(
            help="dummy: seeded random weights.",
            about='"auto" (as stored), "safetensors", or "dummy": random weights, by the seed',
            heading="Model",
        ),
    ] = "auto"
    gemm: Annotated[
        str,
        Option(
            help="Kernel of matrix products on a GPU, to compare the tiers.",
            about=(
                'the kernel of matrix products on a GPU: "auto", "naive", "tiled", "register", "tensor_core", '
                '"hopper", "cublas"'
            ),
            heading="Execution",
            flag=Flag(kind=Literal["auto", "naive", "tiled", "register", "tensor_core", "hopper", "cublas"]),
        ),
    ] = "auto"
    seed: Annotated[
        int | None,
        Option(
            help="Seed of requests without one, and of dummy weights.",
            about="seed of requests without one; default: random",
            heading="Execution",
            least=None,
        ),
    ] = None
    logprobs_mode: Annotated[
        LogprobsMode,
        Option(
            help="Log probabilities or logits that answers tell: the model's (raw), or those that tokens are drawn by.",
            about=(
                'log probabilities in answers: "raw_logprobs", "processed_logprobs" (by which tokens are drawn), '
                '"raw_logits", "processed_logits"'
            ),
            heading="Execution",
        ),
    ] = "raw_logprobs"
    logits_processors: Annotated[
        tuple[Any, ...],
        Option(
            help="Logits processors, MODULE:NAME or names of entry points xserv.logits_processors, by commas.",
            about="functions, `LogitsKernel`s, or names of them (server.md)",
            heading="Execution",
            flag=Flag(kind=str, metavar="NAME,...", read=_names_of_text, write=",".join),
        ),
    ] = ()
    enable_lora: Annotated[
        bool,
        Option(
            help="Take LoRA adapters, by the model's name in a request.",
            about="take LoRA adapters",
            heading="Adapters",
        ),
    ] = False
    max_loras: Annotated[
        int,
        Option(
            help="Adapters on the device at a time; requests for others wait.",
            about="adapters on the device at a time; requests for others wait",
            heading="Adapters",
            least=1,
            most=256,
        ),
    ] = 1
    max_lora_rank: Annotated[
        int,
        Option(
            help="Largest rank of an adapter; each slot has memory for it.",
            about="the largest rank of an adapter, for which each slot has memory",
            heading="Adapters",
            least=1,
            most=512,
        ),
    ] = 16
    max_cpu_loras: Annotated[
        int | None,
        Option(
            help="Adapters kept in host memory, others are read again; default: --max-loras or 8, the larger.",
            about="adapters kept in host memory; default: the larger of `max_loras` and 8",
            heading="Adapters",
            least=1,
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        Option(
            help="Share the KV blocks of equal beginnings.",
            about="share the blocks of equal beginnings",
            heading="Scheduling",
        ),
    ] = True
    prefix_cache_dir: Annotated[
        str,
        Option(
            help="Folder that keeps prefixes for the next start, in clear text, for its owner alone.",
            about='folder that keeps prefixes for the next start; "": none',
            heading="Scheduling",
            flag=Flag(kind=str, metavar="DIR"),
        ),
    ] = ""
    prefix_cache_disk_bytes: Annotated[
        int,
        Option(
            help="Most bytes of --prefix-cache-dir; the least recently used go first.",
            about="most bytes in `prefix_cache_dir`; the least recently used go first",
            heading="Scheduling",
        ),
    ] = 16 * GIB
    swap_space_bytes: Annotated[
        int,
        Option(
            help="GiB of host memory for preempted sequences and idle prefixes.",
            about="host memory for swapped sequences and idle prefixes",
            heading="Scheduling",
            least=0,
            flag=Flag(name="swap_space", kind=float, least=0.0, read=bytes_of_gib, write=gib_of_bytes),
        ),
    ] = 0
    exact: Annotated[
        bool,
        Option(
            help="The same tokens and log probabilities in any batch.",
            about="the same tokens and log probabilities in any batch; `activations` governs rounding",
            heading="Execution",
            flag=Flag(declarations=("--exact",)),
        ),
    ] = False
    activations: Annotated[
        Activations,
        Option(
            help="float: products never round x to bytes; on a CPU integer weights then become floats.",
            about=(
                '"auto": integer products round rows of x to int8 on a cpu, on a GPU where the checkpoint asks for it; '
                '"float": x is never rounded (quantisation.md)'
            ),
            heading="Execution",
        ),
    ] = "auto"
    overlap: Annotated[
        Overlap,
        Option(
            help="Plan a step while one runs; default: on a GPU.",
            about='plan the next step while one runs: "on", "off", "auto" (on a GPU)',
            heading="Execution",
            flag=Flag(declarations=("--overlap/--no-overlap",), kind=bool, read=_on_or_off, write=_unless_auto),
        ),
    ] = "auto"
    decode_graphs: Annotated[
        DecodeGraphsMode,
        Option(
            help="Record decode steps as graphs and replay them; auto: on.",
            about='record decode steps as graphs and replay them: "on", "off", "auto" (on)',
            heading="Execution",
        ),
    ] = "auto"
    decode: Annotated[
        DecodeKernels,
        Option(
            help="Decode layer by layer; megakernel, which was slower, is refused.",
            about='"layers"; "megakernel", one kernel for all layers, was slower and is refused',
            heading="Execution",
        ),
    ] = "layers"
    speculation: Annotated[
        str,
        Option(
            help="Proposer of tokens that a step tries; answers stay as they are.",
            about=(
                '"auto" (a request\'s prediction; nothing for a model with recurrent states), "ngram", "suffix", '
                '"draft:FOLDER", "eagle3", "eagle3:FOLDER", "dflash:FOLDER", "mtp", "mtp:FOLDER" or "off": see '
                "speculation.md; tokens are the same with each"
            ),
            heading="Execution",
            flag=Flag(metavar="auto|off|ngram|suffix|draft:FOLDER|eagle3:FOLDER|dflash:FOLDER|mtp|mtp:FOLDER"),
        ),
    ] = "auto"
    num_speculative_tokens: Annotated[
        int,
        Option(
            help="Most proposals for a sequence in a step; fewer where they do not pay.",
            about="most proposals for a sequence in a step; fewer where they do not pay",
            heading="Execution",
            most=MOST_SPECULATIVE_TOKENS,
        ),
    ] = 7
    speculation_acceptance: Annotated[
        SpeculationAcceptance,
        Option(
            help="Keep proposals that change no token, or more of a draft model's by rejection sampling.",
            about='"exact" (no token changes), or "rejection" (keeps more of a draft model\'s; the distribution stays)',
            heading="Execution",
        ),
    ] = "exact"
    tensor_parallel_size: Annotated[
        int,
        Option(
            help="Ranks that the model is split over: processes with a GPU, or a share of the cores.",
            about="ranks of each layer, processes with a GPU or a share of the cores (parallel.md)",
            heading="Execution",
            most=MOST_RANKS,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Option(
            help="Stages that have the layers one after another; each has the ranks of tensor parallel.",
            about="stages that share the layers, each of `tensor_parallel_size` ranks (parallel.md)",
            heading="Execution",
            most=MOST_RANKS,
        ),
    ] = 1
    pipeline_layers: Annotated[
        str,
        Option(
            help="Layers of each stage, by commas; default: so that all read as many bytes.",
            about="layers of each stage, by commas; by default each reads as many bytes",
            heading="Execution",
        ),
    ] = ""
    data_parallel_size: Annotated[
        int,
        Option(
            help="Engines that share the requests, each a process with the whole model.",
            about="engines that share the requests, processes with the whole model",
            heading="Execution",
            most=MOST_ENGINES,
        ),
    ] = 1
    routing_policy: Annotated[
        RoutingPolicy,
        Option(
            help="Choice of a request's engine: the next, the least busy, or by their prefixes.",
            about=(
                'how a request\'s engine is chosen: "round-robin", "least-load", or "prefix-aware" (load, and blocks '
                "that hold the prompt's beginning)"
            ),
            heading="Execution",
        ),
    ] = "prefix-aware"
    prefill_engines: Annotated[
        int,
        Option(
            help="Engines that compute prompts alone, beside --decode-engines.",
            about="engines that compute prompts alone; after the first token one of `decode_engines` goes on",
            heading="Execution",
            least=0,
            most=MOST_ENGINES,
        ),
    ] = 0
    decode_engines: Annotated[
        int,
        Option(
            help="Engines that continue the answers of --prefill-engines.",
            about="engines that continue the answers of `prefill_engines`",
            heading="Execution",
            least=0,
            most=MOST_ENGINES,
        ),
    ] = 0
    engine_roles: Annotated[
        EngineRoles,
        Option(
            help="Whether each of --data-parallel-size engines takes either role, by load (auto).",
            about=(
                '"auto": each of `data_parallel_size` engines computes prompts or writes answers, by load, so that '
                "requests keep `ttft_target_s` and `tpot_target_s`"
            ),
            heading="Execution",
        ),
    ] = "fixed"
    kv_transfer_address: Annotated[
        str,
        Option(
            help="Private address at which engines of other servers take pages (kv_transfer_params); default: none do.",
            about=(
                "private address, HOST:PORT, at which engines of other servers take pages; of several engines each has "
                'the next port; "": none do'
            ),
            heading="Execution",
            flag=Flag(metavar="HOST:PORT"),
        ),
    ] = ""
    kv_transfer_key_file: Annotated[
        str,
        Option(
            help="File with the key that the servers share which hand requests over to each other.",
            about="file, its owner's alone, with the key that these servers share",
            heading="Execution",
            flag=Flag(metavar="FILE"),
        ),
    ] = ""
    kv_transfer_library: Annotated[
        TransferLibrary,
        Option(
            help="Carrier of pages between machines: TCP, or NIXL (pip install '.[nixl]'; RDMA by UCX).",
            about='carrier of pages between machines: "tcp", or "nixl" (pip install \'.[nixl]\'; RDMA by UCX)',
            heading="Execution",
        ),
    ] = "tcp"
    kv_transfer_bytes: Annotated[
        int,
        Option(
            help="Most bytes of an engine's pages that wait to be taken, and of others' that wait for their requests.",
            about=(
                "most bytes of an engine's pages that wait to be taken by others, and as many of others' that wait for "
                "their requests"
            ),
            heading="Execution",
        ),
    ] = GIB
    distributed_executor_backend: Annotated[
        ExecutorBackend,
        Option(
            help="Starter of the engines' processes: this machine (mp), or Ray (ray).",
            about='starter of the engines: this machine ("mp"), or Ray ("ray")',
            heading="Execution",
        ),
    ] = "mp"

    def __post_init__(self) -> None:
        check_options(self)
        if self.decode == "megakernel":
            raise RequestError(
                "decode is 'megakernel', which was removed: it took 1.42 ms for a step of Qwen3-0.6B on an H200 where"
                " decode 'layers' takes 0.81; use decode 'layers'",
                param="decode",
            )
        if self.hf_overrides != "":
            try:
                object.__setattr__(self, "hf_overrides", _overrides.as_text(self.hf_overrides))
            except InvalidArgumentError as error:
                raise RequestError(str(error), param="hf_overrides") from None
        if self.logits_processors != ():
            object.__setattr__(self, "logits_processors", _processors.checked(self.logits_processors))
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
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise RequestError("give num_blocks or kv_cache_memory_bytes, not both", param="num_blocks")
        prefixes = DRAFT_PREFIX, EAGLE3_PREFIX, DFLASH_PREFIX, MTP_PREFIX
        if not isinstance(self.speculation, str) or self.speculation in ("", *prefixes):
            raise RequestError(
                f"speculation: draft:, eagle3:, dflash: and mtp: need a folder, got {self.speculation!r:.80}",
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
        if self.speculation_acceptance == "rejection" and (self.exact or self.num_ranks > 1):
            cause = "exact" if self.exact else f"{self._split_by} {getattr(self, self._split_by)}"
            why = "answers depend on what was proposed" if self.exact else "its ranks are not sent distributions"
            raise RequestError(
                f"speculation_acceptance is 'rejection', which does not go with {cause}: {why}",
                param="speculation_acceptance",
            )
        if self.preemption == "swap" and self.swap_space_bytes == 0:
            raise RequestError("preemption='swap' needs swap_space_bytes", param="swap_space_bytes")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise RequestError(
                f"max_cpu_loras is {self.max_cpu_loras}, must be at least max_loras = {self.max_loras}",
                param="max_cpu_loras",
            )
        if self.prefix_cache_dir and not self.enable_prefix_caching:
            raise RequestError(
                f"prefix_cache_dir is {self.prefix_cache_dir!r:.80}, which needs enable_prefix_caching",
                param="prefix_cache_dir",
            )
        if self.prefix_cache_dir and self.num_ranks > 1:
            raise RequestError(
                f"prefix_cache_dir is {self.prefix_cache_dir!r:.80}: pages of {self.num_ranks} ranks are not stored; "
                f"leave out {self._split_by} or the folder",
                param="prefix_cache_dir",
            )
        self._check_roles()
        self._check_chunks()

    def _check_roles(self) -> None:
        num_engines = self.prefill_engines + self.decode_engines
        if num_engines:
            if not self.prefill_engines or not self.decode_engines:
                given, other = ("prefill_engines", "decode_engines")[:: 1 if self.prefill_engines else -1]
                raise RequestError(
                    f"{given} is {getattr(self, given)}, {other} 0: both kinds must have an engine", param=other
                )
            if num_engines > MOST_ENGINES:
                raise RequestError(
                    f"prefill_engines and decode_engines are {num_engines}, must be at most {MOST_ENGINES} together",
                    param="prefill_engines",
                )
            if self.data_parallel_size not in (1, num_engines):
                raise RequestError(
                    f"data_parallel_size is {self.data_parallel_size}, but prefill_engines and decode_engines are "
                    f"{num_engines} together: leave it out",
                    param="data_parallel_size",
                )
            object.__setattr__(self, "data_parallel_size", num_engines)
        if self.engine_roles == "auto":
            if num_engines:
                raise RequestError(
                    f"engine_roles is 'auto', but prefill_engines is {self.prefill_engines}: give data_parallel_size "
                    f"{num_engines} instead of both kinds, or leave engine_roles out",
                    param="engine_roles",
                )
            if self.data_parallel_size < 2:
                raise RequestError(
                    "engine_roles is 'auto', but data_parallel_size is 1: prompts and answers need at least 2 engines",
                    param="data_parallel_size",
                )
            if self.batching != "stall-free":
                raise RequestError(
                    f"engine_roles is 'auto', which needs batching 'stall-free', not {self.batching!r}",
                    param="engine_roles",
                )
        if bool(self.kv_transfer_address) != bool(self.kv_transfer_key_file):
            raise RequestError(
                f"kv_transfer_address is {self.kv_transfer_address!r:.80}, kv_transfer_key_file "
                f"{self.kv_transfer_key_file!r:.80}: give both or none",
                param="kv_transfer_address",
            )
        is_between_hosts = bool(self.kv_transfer_address) or (
            self.hands_over and self.distributed_executor_backend == "ray"
        )
        if self.kv_transfer_library != "tcp" and not is_between_hosts:
            raise RequestError(
                f"kv_transfer_library is {self.kv_transfer_library!r}, but no pages go to other machines: give "
                "kv_transfer_address, or engines with roles and distributed_executor_backend 'ray'",
                param="kv_transfer_library",
            )
        name = self.handing_option
        if name is not None and not self.enable_prefix_caching:
            raise RequestError(f"{name} needs enable_prefix_caching", param=name)

    @property
    def hands_over(self) -> bool:
        """Whether engines hand requests over to others."""
        return self.prefill_engines > 0 or self.engine_roles == "auto"

    @property
    def handing_option(self) -> str | None:
        """The setting by which requests go on in another engine or server, or None."""
        if self.hands_over:
            return "prefill_engines" if self.prefill_engines else "engine_roles"
        return "kv_transfer_address" if self.kv_transfer_address else None

    @property
    def most_kept_adapters(self) -> int:
        """Adapters that are kept in host memory."""
        return self.max_cpu_loras or max(8, self.max_loras)

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
        """The ranks of all stages together."""
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
    def pending_tokens(self) -> int:
        """The most draft tokens of a step that recurrent states are to allow for, which takes memory: none unless a
        proposer is named."""
        return 0 if self.speculation in ("auto", "off") else self.num_speculative_tokens

    @property
    def draft_model(self) -> str | None:
        """The folder of the model that proposes tokens, if one does."""
        return self.speculation[len(DRAFT_PREFIX) :] if self.speculation.startswith(DRAFT_PREFIX) else None

    @property
    def reads_hidden_states(self) -> bool:
        """Whether what proposes tokens reads the model's hidden states."""
        prefixes = EAGLE3_PREFIX, DFLASH_PREFIX, MTP_PREFIX
        return self.speculation in ("eagle3", "mtp") or self.speculation.startswith(prefixes)

    def for_processes(self) -> "EngineConfig":
        """The same with names alone as logits processors. Raises ``RequestError`` for one that cannot be named."""
        if not self.logits_processors:
            return self
        return replace(self, logits_processors=_processors.as_names(self.logits_processors))

    @property
    def scheduling(self) -> SchedulingConfig:
        return SchedulingConfig(**{each.name: getattr(self, each.name) for each in fields(SchedulingConfig)})


OPTIONS = option_fields(EngineConfig)
"""The table of an engine's options: checks, flags and docs are made from it."""

EngineConfig.__doc__ = f"{EngineConfig.__doc__}\n\n{describe(EngineConfig)}"
