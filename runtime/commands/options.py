"""The flags that several commands share, as dataclasses, under vLLM's names, the output of reports, and vLLM's
`--speculative-config`: the same as `--speculation` and `--num-speculative-tokens`, in JSON.

A command takes such a dataclass as one parameter; `with_options` spreads its fields over the command line.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from runtime.engine.config import DFLASH_PREFIX, DRAFT_PREFIX, EAGLE3_PREFIX, MTP_PREFIX, OPTIONS, EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.option import OptionField
from runtime.sampling_table import COLUMNS

logger = logging.getLogger("xserv.commands")

_METHODS = {
    "ngram": "ngram", "[ngram]": "ngram", "ngram_gpu": "ngram", "suffix": "suffix", "mtp": "mtp", "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
}  # fmt: skip
_NOT_BUILT = ("eagle", "medusa", "mlp_speculator")
_SAMPLE_METHODS = {"rejection_sample_method": ("standard",), "draft_sample_method": ("greedy", "probabilistic")}
_WITH_FOLDERS = {
    "draft_model": (DRAFT_PREFIX, "a draft model"), "eagle3": (EAGLE3_PREFIX, "an EAGLE-3 drafter"),
    "dflash": (DFLASH_PREFIX, "a DFlash drafter"), "dspark": (DFLASH_PREFIX, "a DSpark drafter"),
}  # fmt: skip
_WITHOUT_EFFECT = {
    "prompt_lookup_max": "the longest agreement is looked for",
    "prompt_lookup_min": "two tokens have to agree",
    "disable_by_batch_size": "how many are tried is chosen from step to step",
    "suffix_decoding_max_tree_depth": "there is no tree",
    "suffix_decoding_max_cached_requests": "a tenant's latest 32,768 tokens are kept",
    "suffix_decoding_max_spec_factor": "how many are tried is chosen from step to step",
    "suffix_decoding_min_token_prob": "how many are tried is chosen from step to step",
}


def options_of(text: str) -> dict[str, Any]:
    """The equivalent engine options. Keys without effect are logged.

    Raises RequestError for another type, an unknown key, and an unsupported method."""
    param = "speculative_config"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise RequestError(f"--speculative-config is no JSON: {error}", param=param) from None
    if not isinstance(given, dict):
        raise RequestError(f"--speculative-config must be a JSON object, got {text:.80}", param=param)
    method = given.pop("method", None)
    if method is None and "model" in given:
        method = "draft_model" if str(given["model"]) not in _METHODS else given.pop("model")
    if method in _NOT_BUILT:
        raise RequestError(f"--speculative-config: the method {method!r} is not built", param=param)
    if isinstance(method, str) and method in _WITH_FOLDERS:
        prefix, what = _WITH_FOLDERS[method]
        folder = given.pop("model", None)
        if not isinstance(folder, str) or not folder:
            raise RequestError(f"--speculative-config: model must be {what}, got {folder!r:.80}", param=param)
        return _with_most({"speculation": prefix + folder}, given)
    if not isinstance(method, str) or method not in _METHODS:
        known = ", ".join((*_WITH_FOLDERS, *(name for name in _METHODS if name.isalpha())))
        raise RequestError(f"--speculative-config: method must be one of {known}, got {method!r:.80}", param=param)
    speculation = _METHODS[method]
    if speculation == "mtp" and "model" in given:
        folder = given.pop("model")
        if not isinstance(folder, str) or not folder:
            raise RequestError(f"--speculative-config: model must be an assistant, got {folder!r:.80}", param=param)
        speculation = MTP_PREFIX + folder
    return _with_most({"speculation": speculation}, given)


def _acceptance_of(given: dict[str, Any]) -> dict[str, Any]:
    """Checks the keys of draft sampling and acceptance. Sampled drafts are accepted by rejection sampling; for greedy
    drafts both acceptance methods are the same."""
    values = {}
    for name, known in _SAMPLE_METHODS.items():
        values[name] = value = given.pop(name, None)
        if value is not None and value not in known:
            raise RequestError(
                f"--speculative-config: {name} must be one of {', '.join(known)}, got {value!r:.80}",
                param="speculative_config",
            )
    draws, keeps = values["draft_sample_method"], values["rejection_sample_method"]
    if draws == "probabilistic" or (keeps == "standard" and draws is None):
        return {"speculation_acceptance": "rejection"}
    return {}


def _with_most(options: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Adds the number of proposals; logs or refuses the rest of ``given``."""
    param = "speculative_config"
    options |= _acceptance_of(given)
    most = given.pop("num_speculative_tokens", None)
    if most is not None:
        if type(most) is not int or most < 1:
            problem = f"num_speculative_tokens must be an integer of at least 1, got {most!r:.80}"
            raise RequestError(f"--speculative-config: {problem}", param=param)
        options["num_speculative_tokens"] = most
    for name in given:
        if name not in _WITHOUT_EFFECT:
            known = ", ".join(("method", "num_speculative_tokens", *_SAMPLE_METHODS, *_WITHOUT_EFFECT))
            raise RequestError(f"--speculative-config: no key {name!r:.80}; there are {known}", param=param)
        logger.warning("--speculative-config: %s has no effect: %s", name, _WITHOUT_EFFECT[name])
    return options


_CONFIG = EngineConfig()

HEADINGS = "Model", "Memory and batches", "Execution", "Scheduling", "Adapters"
"""The headings of the engine's flags in the help, in this order."""


def flag_class(name: str, table: Iterable[OptionField], headings: Sequence[str], *more: tuple[str, Any, Any]) -> type:
    """A dataclass with a field for each flag of a table, by heading: its name, annotation and default; `more` stand
    before them."""
    flags = list(more)
    for each in sorted(_flagged(table), key=lambda each: headings.index(each.option.heading)):
        flag, default = each.option.flag, each.default
        kind = flag.kind or each.kind
        if flag.write is not None:
            default = flag.write(default)
        if default is None:
            kind = kind | None
        declared = typer.Option(
            *flag.declarations, metavar=flag.metavar, help=each.option.help, min=flag.least, envvar=flag.variable
        )
        flags.append((each.flag_name, Annotated[kind, declared], default))
    return make_dataclass(name, flags, frozen=True, kw_only=True)


def headings_of(table: Iterable[OptionField]) -> dict[str, str]:
    """Under which heading of the help each flag of a table stands."""
    return {each.flag_name: each.option.heading for each in _flagged(table)}


def values_of(flags: Any, table: Iterable[OptionField]) -> dict[str, Any]:
    """The values that flags have, under their options' names and in their units; those that are None are left out.
    Raises `RequestError` for a text that cannot be read."""
    values = {each.name: value for each in fields(flags) if (value := getattr(flags, each.name)) not in (None, [])}
    for each in _flagged(table):
        if each.flag_name in values:
            value, read = values.pop(each.flag_name), each.option.flag.read
            values[each.name] = value if read is None else read(value)
    return values


def _flagged(table: Iterable[OptionField]) -> list[OptionField]:
    return [each for each in table if each.option.heading]


_help = "A folder, a GGUF file or a hub id (owner/name:Q4_K_M of a GGUF); without it, the bundled one."
_model = Annotated[str | None, typer.Option("--model", "-m", metavar="PATH|HUB_ID", help=_help)]
_EngineFlags: Any = flag_class("_EngineFlags", OPTIONS, HEADINGS, ("model", _model, None))


Adapter = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="LoRA adapter, as PEFT writes it; without --model its own base model is loaded."
    ),
]
"""The option of commands that answer with one adapter."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(_EngineFlags):  # type: ignore[misc]
    """The options of an engine; the flags and defaults are `EngineConfig`'s."""

    HEADINGS: ClassVar = {
        "model": "Model",
        "speculative_config": "Execution",
        **headings_of(OPTIONS),
    }
    """Under which heading of the help an option and those after it stand."""

    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON", help='The same as vLLM writes it: {"method": "ngram"}.')
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `build_engine`, or of `LLM`; what is None is left to their defaults.

        Raises `RequestError` for stages that are not four integers, and a wrong `speculative_config`.
        """
        values = values_of(self, OPTIONS)
        if (text := values.pop("speculative_config", None)) is not None:
            for name, value in options_of(text).items():
                if values[name] not in (value, getattr(_CONFIG, name)):
                    option = f"--{name.replace('_', '-')} {values[name]}"
                    problem = f"{option} and --speculative-config say different things"
                    raise RequestError(problem, param="speculative_config")
                values[name] = value
        return values


@dataclass(frozen=True, kw_only=True)
class LlmOptions(EngineOptions):
    """The options of `LLM`: those of an engine, and of a tokenizer."""

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


_NumberOptions: Any = make_dataclass(
    "_NumberOptions",
    [(name, Annotated[column.kind | None, typer.Option(help=column.help)], None) for name, column in COLUMNS.items()],
    frozen=True,
    kw_only=True,
)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(_NumberOptions):  # type: ignore[misc]
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
    samplers: Annotated[
        list[str] | None,
        typer.Option("--sampler", help="Sampler that acts, by llama.cpp's name; repeat it for others, in order."),
    ] = None
    temperature_last: Annotated[
        bool | None, typer.Option("--temperature-last", help="The temperature after the filters, as llama.cpp.")
    ] = None
    dry_sequence_breakers: Annotated[
        list[str] | None,
        typer.Option("--dry-sequence-breaker", help="Text that DRY's repetitions do not reach over; may be repeated."),
    ] = None

    def given(self) -> dict[str, Any]:
        """The fields that were named on the command line."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, [])}


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


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The targets of a report."""

    as_json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON object on stdout.")] = False
    output_json: Annotated[Path | None, typer.Option(help="Write the whole report to this file, too.")] = None

    def deliver(self, report: dict[str, Any], text: str) -> None:
        """Print the report as JSON, or `text` for a person; and write it to a file if given."""
        if self.output_json is not None:
            self.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report) if self.as_json else text)


def listing(report: dict[str, Any], lines: dict[str, Any]) -> str:
    """A line for each name and value, and one for the environment."""
    written = [
        f"{name + ':':<40}{value:>14,.3f}" if isinstance(value, float) else f"{name + ':':<40}{value!s:>14}"
        for name, value in lines.items()
    ]
    environment = report["environment"]
    words = [environment[key] for key in ("model", "dtype", "device") if key in environment]
    words.append(f"{environment.get('num_threads', environment['num_cores'])} threads")
    return "\n".join([*written, "  ".join(["", *words])])
