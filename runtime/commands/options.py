"""The flags that several commands share, as dataclasses, under vLLM's names.

A command takes such a dataclass as one parameter; `with_options` spreads its fields over the command line.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import typer

from runtime.commands.speculative_config import options_of
from runtime.engine.config import (
    Batching,
    DecodeGraphsMode,
    DecodeKernels,
    EngineConfig,
    ExecutorBackend,
    KVCacheDtype,
    Policy,
    Preemption,
    Quantization,
    RoutingPolicy,
    SpeculationAcceptance,
    Victim,
)
from runtime.engine.errors import RequestError
from runtime.sampling_table import COLUMNS

GIB = 1 << 30
_CONFIG = EngineConfig()


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What an engine is built of; the defaults are `EngineConfig`'s."""

    HEADINGS: ClassVar = {
        "model": "Model",
        "max_model_len": "Memory and batches",
        "load_format": "Model",
        "gemm": "Execution",
        "scheduling_policy": "Scheduling",
        "exact": "Execution",
    }
    """Under which heading of the help an option and those behind it stand."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="PATH|HUB_ID",
            help="A folder, a GGUF file or a hub id (owner/name:Q4_K_M of a GGUF); without it, the bundled one.",
        ),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda[:N], or emulated[:sm_80|sm_90a|sm_120a].")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        typer.Option(help="Type of the weights; auto: as stored."),
    ] = "auto"
    quantization: Annotated[
        Quantization, typer.Option(help="Of the weights while they are loaded.")
    ] = _CONFIG.quantization
    kv_cache_dtype: Annotated[
        KVCacheDtype, typer.Option(help="Type of the KV cache; auto: the weights'. int8 and fp8 take a byte a number.")
    ] = _CONFIG.kv_cache_dtype
    kv_cache_dtype_skip_layers: Annotated[
        str,
        typer.Option(help="Layers whose pages stay in the weights' type: numbers and sliding_window, by commas."),
    ] = _CONFIG.kv_cache_dtype_skip_layers
    hf_overrides: Annotated[
        str, typer.Option(metavar="JSON", help="Fields of the model's config.json to replace; null: pass one over.")
    ] = _CONFIG.hf_overrides
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer together; default: the model's.")
    ] = None
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in one step.")] = _CONFIG.max_num_seqs
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in one step; default: 2048 on a GPU, 512 on a cpu.")
    ] = None
    block_size: Annotated[int, typer.Option(help="Tokens in one KV block.")] = _CONFIG.block_size
    kv_cache_bytes: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-memory-bytes",
            "--kv-cache-bytes",
            help="Bytes of the KV cache; default: by free memory.",
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], typer.Option(help="dummy: seeded random weights.")
    ] = "auto"
    gemm: Annotated[
        Literal["auto", "naive", "tiled", "register", "tensor_core", "hopper", "cublas"],
        typer.Option(help="Kernel of matrix products on a GPU, to compare the tiers."),
    ] = "auto"
    seed: Annotated[int | None, typer.Option(help="Of sampling without a seed of its own, and of dummy weights.")] = (
        None
    )
    scheduling_policy: Annotated[
        Policy, typer.Option(help="Whose turn it is: by priority and arrival, by arrival, or by least slack.")
    ] = _CONFIG.scheduling_policy
    batching: Annotated[
        Batching, typer.Option(help="How prompts and decodes share steps; all but stall-free are for comparison.")
    ] = _CONFIG.batching
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Most tokens of one prompt in one step; default: what the budget leaves.")
    ] = None
    prefill_chunk_stages: Annotated[
        str | None,
        typer.Option(
            metavar="HIGH,LOW,STAGES,TOKENS",
            help="Chunks that shrink from HIGH to LOW in STAGES over a prompt's first TOKENS.",
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, typer.Option(help="Share the KV blocks of equal beginnings.")] = (
        _CONFIG.enable_prefix_caching
    )
    swap_space: Annotated[
        float, typer.Option(help="GiB of host memory for preempted sequences and idle prefixes.", min=0.0)
    ] = _CONFIG.swap_space_bytes / GIB
    preemption: Annotated[
        Preemption, typer.Option(help="How a preempted sequence's content comes back; auto: the cheaper.")
    ] = _CONFIG.preemption
    victim: Annotated[Victim, typer.Option(help="Who is preempted when blocks are missing.")] = _CONFIG.victim
    ageing: Annotated[float, typer.Option(help="Seconds of waiting that one unit of priority is worth.")] = (
        _CONFIG.ageing_s
    )
    ttft_target: Annotated[float, typer.Option(help="Seconds to the first token, for the deadline policy.")] = (
        _CONFIG.ttft_target_s
    )
    tpot_target: Annotated[float, typer.Option(help="Seconds to each next token, for the deadline policy.")] = (
        _CONFIG.tpot_target_s
    )
    exact: Annotated[bool, typer.Option("--exact", help="The same tokens and log probabilities in any batch.")] = (
        _CONFIG.exact
    )
    activations: Annotated[
        Literal["auto", "float"],
        typer.Option(help="float: products never round x to bytes; on a CPU integer weights then become floats."),
    ] = "auto"
    overlap: Annotated[
        bool | None,
        typer.Option("--overlap/--no-overlap", help="Plan a step while one runs; default: on a GPU."),
    ] = None
    decode_graphs: Annotated[
        DecodeGraphsMode,
        typer.Option(help="Record decode steps as graphs and replay them; auto: on."),
    ] = _CONFIG.decode_graphs
    decode: Annotated[
        DecodeKernels,
        typer.Option(help="Decode layer by layer; megakernel, which was slower, is refused."),
    ] = _CONFIG.decode
    speculation: Annotated[
        str,
        typer.Option(
            metavar="auto|off|ngram|suffix|draft:FOLDER|eagle3:FOLDER|dflash:FOLDER|mtp",
            help="Who proposes tokens that a step tries; answers stay as they are.",
        ),
    ] = _CONFIG.speculation
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Most proposals for a sequence in a step; fewer where they do not pay.")
    ] = _CONFIG.num_speculative_tokens
    speculation_acceptance: Annotated[
        SpeculationAcceptance,
        typer.Option(help="Keep proposals that change no token, or more of a draft model's by rejection sampling."),
    ] = _CONFIG.speculation_acceptance
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Ranks that the model is split over: processes with a GPU, or a share of the cores.")
    ] = _CONFIG.tensor_parallel_size
    pipeline_parallel_size: Annotated[
        int, typer.Option(help="Stages that have the layers one after another; each has the ranks of tensor parallel.")
    ] = _CONFIG.pipeline_parallel_size
    pipeline_layers: Annotated[
        str, typer.Option(help="Layers of each stage, by commas; default: so that all read as many bytes.")
    ] = _CONFIG.pipeline_layers
    data_parallel_size: Annotated[
        int, typer.Option(help="Engines that share the requests, each a process with the whole model.")
    ] = _CONFIG.data_parallel_size
    routing_policy: Annotated[
        RoutingPolicy, typer.Option(help="Which engine gets a request: the next, the least busy, or by their prefixes.")
    ] = _CONFIG.routing_policy
    distributed_executor_backend: Annotated[
        ExecutorBackend, typer.Option(help="Who starts the engines' processes: this machine (mp), or Ray (ray).")
    ] = _CONFIG.distributed_executor_backend
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="The same as vLLM writes it: {\"method\": \"ngram\"}.")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `build_engine`, or of `LLM`; what is None is left to their defaults.

        Raises `RequestError` for stages that are not four integers, and a wrong `speculative_config`.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if (text := values.pop("speculative_config")) is not None:
            for name, value in options_of(text).items():
                if values[name] not in (value, getattr(_CONFIG, name)):
                    option = f"--{name.replace('_', '-')} {values[name]}"
                    problem = f"{option} and --speculative-config say different things"
                    raise RequestError(problem, param="speculative_config")
                values[name] = value
        values["swap_space_bytes"] = round(values.pop("swap_space") * GIB)
        for name in ("ageing", "ttft_target", "tpot_target"):
            values[f"{name}_s"] = values.pop(name)
        if self.prefill_chunk_stages is not None:
            values["prefill_chunk_stages"] = integers("prefill_chunk_stages", self.prefill_chunk_stages)
        if self.overlap is not None:
            values["overlap"] = "on" if self.overlap else "off"
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class LlmOptions(EngineOptions):
    """What `LLM` is made of: an engine, and a tokenizer."""

    HEADINGS: ClassVar = {**EngineOptions.HEADINGS, "tokenizer": "Model"}

    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder or GGUF file of the tokenizer; default: the model's.")
    ] = None
    chat_template: Annotated[
        str | None, typer.Option(metavar="PATH", help="Jinja template, a file or itself; default: the model's.")
    ] = None
    skip_tokenizer_init: Annotated[bool, typer.Option("--skip-tokenizer-init", help="Token ids in, token ids out.")] = (
        False
    )
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr while the model is loaded.")] = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`. Raises as `EngineOptions.arguments`."""
        values = super().arguments()
        values["use_tqdm_on_load"] = not values.pop("quiet")
        return values


if TYPE_CHECKING:

    @dataclass(frozen=True, kw_only=True)
    class _NumberOptions: ...
else:
    _NumberOptions = make_dataclass(
        "_NumberOptions",
        [
            (name, Annotated[column.kind | None, typer.Option(help=column.help)], None)
            for name, column in COLUMNS.items()
        ],
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(_NumberOptions):
    """`SamplingParams`' fields, those of `runtime.sampling_table` first. None: as in the model's generation config,
    else `SamplingParams`' default."""

    HEADINGS: ClassVar = {"temperature": "Sampling", "max_tokens": "Sampling"}

    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens of an answer.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="String that ends an answer; may be repeated.")] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", help="Token id that ends an answer; may be repeated."),
    ] = None
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos", help="Go on after end-of-sequence.")] = None

    def given(self) -> dict[str, Any]:
        """The fields that were named on the command line."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, [])}


def integers(name: str, text: str) -> tuple[int, ...]:
    """``"32,256"`` → ``(32, 256)``. Raises `RequestError` with the option's name."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"{name} must be integers with commas between them, got {text!r:.80}", param=name) from None


def numbers(name: str, text: str) -> tuple[float, ...]:
    """``"0.3,1"`` → ``(0.3, 1.0)``. Raises `RequestError` with the option's name."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"{name} must be numbers with commas between them, got {text!r:.80}", param=name) from None


def with_options(command: Callable[..., None], *, takes_model: bool = False) -> Callable[..., None]:
    """A command whose dataclass parameters are spread into one option a field.

    `def f(text: str, engine: EngineOptions)` becomes, for typer, `f(text, *, model=None, device="auto",
    ...)`. With `takes_model` the model may also be given as an argument, without `--model`.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []

    def add(name: str, annotation: Any, default: Any) -> None:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, annotation=annotation, default=default))

    if takes_model:
        argument = typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
        add("model_argument", Annotated[str | None, argument], None)
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            add(parameter.name, hints[parameter.name], parameter.default)
            continue
        group = groups[parameter.name]
        group_hints = get_type_hints(group, include_extras=True)
        headings, heading = getattr(group, "HEADINGS", {}), None
        for field in fields(group):
            assert field.default is not MISSING, f"{group.__name__}.{field.name} needs a default"
            heading = headings.get(field.name, heading)
            add(field.name, _under(heading, group_hints[field.name]), field.default)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        model = values.pop("model_argument", None)
        if model is not None:
            if values["model"] is not None:
                raise typer.BadParameter(f"the model {model!r} is given beside --model {values['model']!r}")
            values["model"] = model
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__dict__["__wrapped__"]  # or typer would read the command's own annotations
    return run


def _under(heading: str | None, hint: Any) -> Any:
    """The same annotation, with the option under a heading of the help."""
    kind, option = get_args(hint)
    option = copy.copy(option)
    option.rich_help_panel = heading
    return Annotated[kind, option]
