"""Loads a model from its folder."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from models.base import Architecture, Model
from models.checkpoints.checkpoint import Checkpoint, TensorLayout
from models.checkpoints.dummy import dummy_checkpoint
from models.checkpoints.model_files import ModelFiles, open_model
from models.checkpoints.stacked import take_apart
from models.checkpoints.weight_files import open_checkpoint
from models.classifier import base_of
from models.configuration.class_defaults import add_class_defaults
from models.configuration.config import ModelConfig
from models.configuration.harmless_fields import is_harmless
from models.configuration.json_fields import Fields
from models.configuration.overrides import changes
from models.configuration.rope_config import RopeConfig
from models.encoder import BothWays, bidirectional_of, has_bidirectional
from models.errors import ConfigError, ModelLoadError
from models.families import architecture_named, architectures_naming, known_architectures
from models.makers.declaring_maker import DeclaringMaker
from models.makers.loading_maker import LoadingMaker
from models.makers.maker import Maker
from models.quantized.on_load import rounded_on_load
from models.quantized.scheme import read_quantization, with_quantized
from models.stages import balanced, counted
from runtime.communicator import Communicator, Pipeline
from runtime.dtype import DType, bfloat16, float32
from runtime.errors import InvalidArgumentError
from runtime.later import later
from runtime.linear.kept import kept_format
from runtime.linear.options import LoadOptions, LoadSettings
from runtime.linear.quantized import QuantizedLayout
from runtime.progress import SILENT, Reporter
from tokenizer.warn import warn_once

logger = logging.getLogger("xserv.models")

_missing = later("models.configuration.missing_operations")  # of models that are refused

LoadFormat = Literal["auto", "safetensors", "dummy"]
DEFAULT_OPTIONS = LoadOptions()


def load_config(model: str | Path, overrides: str = "", mmproj: str = "") -> ModelConfig:
    """The typed form of a model's config: of a folder's `config.json`, or of a GGUF file's metadata, with the
    `models.configuration.overrides` of its fields and its tower (`models.gguf.mmproj`).

    Raises `ConfigError`, naming file, field and value, for a file that is missing or not JSON, a field that is missing,
    out of range or unknown, and an unknown architecture.
    """
    return _parse(open_model(model, overrides, mmproj).config())


def parse_config(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The typed form of a `config.json` already read; `where` names it in errors."""
    return _parse(Fields(values, where))


def _parse(fields: Fields) -> ModelConfig:
    architecture = find_architecture(fields)
    fields.owner = architecture.name
    if fields.has("peft_type"):
        raise fields.error(
            "peft_type",
            f"= {fields.raw('peft_type')!r:.80}: an adapter beside the weights is not implemented here: merge it (peft:"
            " `merge_and_unload`, then `save_pretrained`). If the weights are whole, pass over it with --hf-overrides"
            " '{\"peft_type\": null}'",
        )
    add_class_defaults(fields, architecture.model_type)
    config = architecture.read_config(fields)
    score_tokens = fields.strings("classifier_from_token") or ()
    if score_tokens and len(score_tokens) > 2:
        raise fields.error("classifier_from_token", f"names {len(score_tokens)} tokens, must name one or two")
    if score_tokens:
        fields.expect("method", "from_2_way_softmax", "no_post_processing")
        fields.expect("is_original_qwen3_reranker", True, False)
    read_quantization(fields)
    if fields.has("vision_config"):  # a tower has no words to tie, though older classes wrote the field
        fields.object("vision_config").notes = frozenset({"tie_word_embeddings"})
    fields.refuse_unread(is_harmless, _ADVICE)
    positions = config.max_position_embeddings
    ropes: set[RopeConfig] = set(getattr(config, "layer_ropes", ())) - {None}
    reach = min((rope.reach(positions) for rope in ropes), default=positions)  # of all layers
    return replace(
        config, architecture=architecture.name, max_position_embeddings=reach, score_tokens=tuple(score_tokens)
    )


_ADVICE = ": no code reads it. If the model computes the same without it, ignore it with --hf-overrides '{null}'"


def find_architecture(fields: Fields) -> Architecture:
    """The architecture that the config names; in both directions if it is a decoder and `is_causal` is false.

    A model that has no such form leaves the field unread, so that it is refused."""
    found = _find(fields)
    if fields.values().get("is_causal") is False:
        if issubclass(found.model_class, BothWays):
            fields.expect("is_causal", False)
        elif has_bidirectional(found):
            return bidirectional_of(found)
    return found


def _find(fields: Fields) -> Architecture:
    """The architecture by `architectures`, or by `model_type` if the file names none, a headless model such as
    Qwen3Model, or an unknown name such as LLaMAForCausalLM.

    An unknown `model_type`, such as kimi_k2, is ignored beside a known architecture."""
    names, model_type = fields.strings("architectures"), fields.string("model_type", None)
    if fields.has("classifier_from_token"):  # scored by a decoder's own head
        names = [base_of(name) for name in names or ()]
    known = architectures_naming(*(names or ()), *([model_type] if model_type else []))
    if known.keys().isdisjoint(names or ()):
        known = known_architectures()
    for one in known.values():
        if one.chosen_by and one.model_type == model_type and fields.raw(one.chosen_by) is True:
            return one
    known = {name: one for name, one in known.items() if not one.chosen_by}
    of_type = next((one for one in known.values() if one.model_type == model_type), None)
    architecture = next((known[name] for name in names or () if name in known), None)
    if architecture is None:
        headless = [one for one in known.values() if not _names_without_head(one).isdisjoint(names or ())]
        architecture = of_type if of_type in headless else next(reversed(headless), None)
    if architecture is not None:
        if of_type is not None and of_type.saved_as == architecture.name:
            return of_type
        if of_type is not None and model_type != architecture.model_type:
            raise fields.error(
                "model_type",
                f"{model_type!r:.80} contradicts the architecture {architecture.name}: if that is right, pass over"
                " the type with --hf-overrides '{\"model_type\": null}'",
            )
        return architecture
    if of_type is not None and not names:
        return of_type
    if of_type is not None and (kind := _HEADS.search(of_type.name)) and any(n.endswith(kind[0]) for n in names or ()):
        warn_once(
            f"{fields.where}: architectures {', '.join(names or ())[:200]!r} is read as {of_type.name}, by model_type"
            f" {model_type!r}, as in transformers"
        )
        return of_type
    missing = _missing.missing_operations(fields.values())
    supported = f"is not supported. {missing}. Supported are {', '.join(known)}"
    if names:
        raise fields.error("architectures", f"{', '.join(names)[:200]!r} {supported}")
    if model_type is None:
        raise fields.error("architectures", "is missing, and model_type too")
    raise fields.error("model_type", f"{model_type!r:.80} {supported}")


_HEADS = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$")


def _names_without_head(architecture: Architecture) -> set[str]:
    """transformers' classes of a model without its output head."""
    stem = _HEADS.sub("", architecture.name)
    return {f"{stem}Model", f"{stem}TextModel"}


@dataclass(frozen=True, slots=True)
class Declaration:
    """A model before it is loaded, by its config and the headers of its files.

    Attributes:
        folder: of the model, or its GGUF file.
        config: of the whole model, tied or not as the files have it.
        model: this rank's, without its numbers: shapes, types and `weight_bytes`. It cannot run.
        options: the device and types of weights.
        source: the tensors, which fit the model.
        warnings: deviations from the files, to be logged when it is loaded.
    """

    folder: Path
    config: ModelConfig
    model: Model
    options: LoadOptions
    source: Checkpoint
    warnings: tuple[str, ...] = ()

    def load(
        self, *, max_model_len: int | None = None, reporter: Reporter = SILENT,
        communicator: Communicator | None = None, pipeline: Pipeline | None = None,
    ) -> Model:  # fmt: skip
        """The model with its numbers. Raises `ModelLoadError`, and `InvalidArgumentError` for `max_model_len`.

        Args:
            max_model_len: as in `declare`; None means that call's value.
            reporter: shows how many bytes of weights are there.
            communicator, pipeline: of the declared rank, if they are created only now.
        """
        for warning in self.warnings:
            logger.warning("%s", warning)
        self.source.check_numbers()
        options, size_bytes = self.options, self.model.weight_bytes
        if communicator is not None or pipeline is not None:
            options = replace(options, communicator=communicator, pipeline=pipeline)
        positions = self.model.max_positions if max_model_len is None else _positions(self.config, max_model_len)
        with reporter.shown("loading weights", is_bytes=True) as show:
            show(0, size_bytes)
            maker = LoadingMaker(options, positions, self.source, lambda done: show(done, size_bytes))
            model = _built(self.config, maker)
        if maker.dequantised_bytes:
            kinds = ", ".join(f"{kind} ({count:,} bytes)" for kind, count in maker.dequantised_bytes.most_common())
            logger.info("%s: stored in %s, dequantised to %s", self.folder, kinds, maker.dtype.name)
        return model


def declare(
    folder: str | Path,
    *,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    weights: Path | Checkpoint | None = None,
    **settings: Unpack[LoadSettings],
) -> Declaration:
    """The model in `folder`, checked against its files' headers; nothing else is read. One run of its constructor.

    Args:
        folder: holds `config.json` and safetensors; or a GGUF file.
        load_format: "auto" (as the model is stored), "safetensors", or "dummy": seeded random weights from the config.
        seed: of the dummy weights.
        max_model_len: tokens that a sequence will have at most, to keep position tables small. None means the config's
            `max_position_embeddings`, which is also the limit.
        weights: other ones than the folder's: of another folder or GGUF file of the same model, or the stored tensors.
        settings: `LoadOptions.parse`'s: device, dtype, quantization, gemm, exact, communicator, pipeline, stages; and
            `hf_overrides`, from `models.configuration.overrides.as_text`, and `mmproj`, of `models.gguf.mmproj`.

    Raises:
        ModelLoadError: naming the file, the tensor or field, and the value at fault.
        InvalidArgumentError: for an argument that is not one of the above.
    """
    options, overrides = LoadOptions.parse(**settings), settings.get("hf_overrides", "")
    mmproj = settings.get("mmproj", "")
    if load_format not in ("auto", "safetensors", "dummy"):
        raise InvalidArgumentError(
            f"load_format must be auto, safetensors or dummy, not {load_format!r}", param="load_format"
        )
    files = open_model(folder, overrides, mmproj)
    said = _parse(files.config())
    positions = _positions(said, max_model_len)
    if load_format == "safetensors" and not Path(folder).is_dir():
        raise InvalidArgumentError(f"load_format is 'safetensors', but {folder} is no folder", param="load_format")
    if load_format == "dummy":
        config, dtype = said, options.dtype or said.dtype or float32
        maker, model = _declared(config, options, positions, dtype)
        layout = _layout(config, maker)
        source = dummy_checkpoint(layout, seed, dtype, _quantized_layouts(files, layout))
    else:
        source = files.checkpoint() if weights is None else _other_weights(files, said, weights, overrides, mmproj)
        dtype = source.main_dtype()
        options = _with_usual_types(options, source, said)
        config, maker, model = _fitted(source, said, options, positions, dtype)
        if source.main_dtype() is not dtype:  # most elements are of buffers, which the model computes
            maker, model = _declared(config, options, positions, source.main_dtype())
    rounded = _rounded(source, config, maker)
    maker.settle(rounded)
    model.weight_bytes, model.layer_bytes, model.mapped_bytes = maker.size_bytes, maker.layer_bytes, maker.mapped_bytes
    model.rounded_activations = maker.rounded_activations
    warnings = () if options.rank else _warnings(folder, overrides, mmproj, said, config)
    return Declaration(Path(folder), config, model, options, rounded, warnings)


def _with_usual_types(options: LoadOptions, source: Checkpoint, config: ModelConfig) -> LoadOptions:
    """Types of a file in ggml's blocks, which names none, where the user names none either: its floats on a GPU, and
    its pages on a CPU, are bfloat16, whose range is float32's."""
    if options.dtype is not None or not source.is_in_blocks():
        return options
    if options.device.kind != "cpu":
        return replace(options, dtype=bfloat16)
    is_left_open = options.kv_dtype is None and not options.has_float_activations
    generates = architecture_named(config.architecture).class_of(config).generates
    return replace(options, kv_dtype=bfloat16) if is_left_open and generates else options


def _other_weights(
    files: ModelFiles, said: ModelConfig, weights: Path | Checkpoint, overrides: str, mmproj: str
) -> Checkpoint:
    """The stored tensors of other weights of a model. Raises `ConfigError` if they are another model's."""
    if (
        isinstance(weights, Path)
        and weights.is_file() == files.path.is_file()
        and (weights.is_file() or (weights / "config.json").is_file())
    ):
        other = open_model(weights, overrides, mmproj)
        config = replace(_parse(other.config()), dtype=said.dtype, tie_word_embeddings=said.tie_word_embeddings)
        if config != said:
            names = [
                each.name
                for each in dataclasses.fields(config)
                if getattr(config, each.name) != getattr(said, each.name, None)
            ]
            raise ConfigError(
                f"{weights}: the weights are another model's than {files.path}: {', '.join(names)} differ"
            )
        return other.checkpoint()
    if not files.path.is_dir() or (isinstance(weights, Path) and not weights.is_dir()):
        kind = "a folder" if files.path.is_dir() else "a GGUF file"
        place = weights if isinstance(weights, Path) else weights.place
        raise ConfigError(f"{place}: the model {files.path} is {kind}, and so must its new weights be")
    checkpoint = open_checkpoint(weights) if isinstance(weights, Path) else weights
    return with_quantized(checkpoint, read_quantization(files.config()))


def declare_model(folder: str | Path, **arguments: Any) -> Model:
    """The `Declaration`'s model; arguments and errors are `declare`'s."""
    return declare(folder, **arguments).model


def load_model(folder: str | Path, *, reporter: Reporter = SILENT, **arguments: Any) -> Model:
    """Load the model in `folder`; `reporter` shows how many bytes of weights are there. Other arguments and errors are
    `declare`'s."""
    return declare(folder, **arguments).load(reporter=reporter)


def _warnings(
    folder: str | Path, overrides: str, mmproj: str, said: ModelConfig, config: ModelConfig
) -> tuple[str, ...]:
    """Warnings about deviations from the files."""
    made = []
    if overrides:
        stored = open_model(folder, mmproj=mmproj).config().values()
        made = [f"{folder}: with hf_overrides {each}" for each in changes(stored, overrides)]
    if config.tie_word_embeddings != said.tie_word_embeddings:
        holds, head = "an output head that differs from the embedding", "the stored one"
        if config.tie_word_embeddings:
            holds, head = "no output head", "the embedding"
        ties = said.tie_word_embeddings
        made.append(f"{folder}: tie_word_embeddings is {ties}, but the files hold {holds}: the head is {head}")
    return tuple(made)


def stages_of(
    folder: str | Path, num_stages: int, counts: Sequence[int] = (), *, load_format: LoadFormat = "auto",
    **settings: Unpack[LoadSettings],
) -> tuple[range, ...]:  # fmt: skip
    """The layers of each stage: `counts` of them, or balanced by bytes. Raises `ConfigError` if there are too few
    layers, and as `declare_model`."""
    whole = declare_model(folder, load_format=load_format, **settings)
    if not whole.generates:
        raise InvalidArgumentError(
            f"pipeline_parallel_size is {num_stages}, must be 1: {whole.config.architecture} generates nothing, and"
            " runs in one stage",
            param="pipeline_parallel_size",
        )
    least: dict[str, Any] = {
        "least_first": whole.least_first_layers, "least_last": whole.least_last_layers,
        "name": whole.config.architecture,
    }  # fmt: skip
    if counts:
        return counted(counts, len(whole.layer_bytes), **least)
    return balanced(whole.layer_bytes, num_stages, last_bytes=whole.lm_head.weight.size_bytes, **least)


def tensor_layout(config: ModelConfig) -> TensorLayout:
    """The tensors that a checkpoint of this config must store."""
    return _layout(config, _declared(config)[0])


def _layout(config: ModelConfig, maker: DeclaringMaker) -> TensorLayout:
    """The layout that a checkpoint must have for the model that ran over this maker: of all stages."""
    if maker.options.pipeline is not None:
        return tensor_layout(config)
    model_class = architecture_named(config.architecture).class_of(config)
    return maker.layout(model_class.prefix, model_class.harmless_tensors(config), model_class.renames)


def fit_model(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Fits a checkpoint to a model, and returns the model's config: tied or not as in the files, not the config. Raises
    `WeightsError`."""
    return _fitted(checkpoint, config)[0]


def _fitted(
    checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions = DEFAULT_OPTIONS, positions: int = 1,
    main_dtype: DType = float32,
) -> tuple[ModelConfig, DeclaringMaker, Model]:  # fmt: skip
    """`fit_model`, and the model's layout."""
    model_class = architecture_named(config.architecture).class_of(config)
    if problem := model_class.contradiction(config, checkpoint.tensors):
        raise ConfigError(f"{checkpoint.place}: {problem}")
    maker, model = _declared(config, options, positions, main_dtype)
    layout = _layout(config, maker)
    if maker.heads and checkpoint.ties_otherwise(layout, maker.heads):
        config = replace(config, tie_word_embeddings=not config.tie_word_embeddings)
        maker, model = _declared(config, options, positions, main_dtype)
        layout = _layout(config, maker)
    checkpoint.fit(layout)
    return config, maker, model


def _declared(
    config: ModelConfig, options: LoadOptions = DEFAULT_OPTIONS, positions: int = 1, main_dtype: DType = float32
) -> tuple[DeclaringMaker, Model]:
    """The layout of a model of this config."""
    maker = DeclaringMaker(options, positions, main_dtype)
    return maker, _built(config, maker)


def quantisable_matrices(
    folder: str | Path, checkpoint: Checkpoint, overrides: str = ""
) -> tuple[ModelConfig, set[str]]:
    """A model's config, and the names of its linear maps, without its output head. Fits the checkpoint to the model.

    Raises `ModelLoadError` for a tensor that does not fit, and for maps that are stored inputs first.
    """
    config, maker, _ = _fitted(checkpoint, load_config(folder, overrides))
    if maker.transposed:
        raise ModelLoadError(f"{folder}: {config.architecture} stores its maps inputs first, which is not quantised")
    return config, maker.matrices - maker.tables


def _built(config: ModelConfig, maker: Maker) -> Model:
    options = maker.options
    config = config.of_a_rank(options.rank, options.num_ranks, exact=options.exact)
    model = architecture_named(config.architecture).class_of(config)(config, maker)
    model.weight_bytes, model.layer_bytes, model.mapped_bytes = maker.size_bytes, maker.layer_bytes, maker.mapped_bytes
    return model


def _positions(config: ModelConfig, max_model_len: int | None) -> int:
    """Tokens that a sequence may have. Raises `InvalidArgumentError`."""
    limit = config.max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise InvalidArgumentError(
            f"max_model_len must be from 1 to {limit} (max_position_embeddings), not {max_model_len}",
            param="max_model_len",
        )
    return max_model_len or limit


def _rounded(source: Checkpoint, config: ModelConfig, maker: DeclaringMaker) -> Checkpoint:
    """The source with matrices that are rounded as the options ask. Raises `InvalidArgumentError` if it has others."""
    options = maker.options
    if not options.rounding:
        return source
    if maker.transposed:
        raise InvalidArgumentError(
            f"quantization is {options.rounding!r}: {config.architecture} stores its maps inputs first, which is"
            " rounded to int8 alone",
            param="quantization",
        )
    matrices = maker.matrices | maker.heads
    stored = [source[name].quantized or source[name].block_format for name in matrices]
    if any(stored):
        raise InvalidArgumentError(
            f"quantization is {options.rounding!r}, but the model is quantised already: leave it out",
            param="quantization",
        )

    def can_keep(layout: QuantizedLayout) -> bool:
        # Activations may be rounded, else numbers are rounded, then floats again; cuBLAS gets the rounded numbers.
        return kept_format(layout, replace(options, activations="auto", gemm="auto")) is not None

    return rounded_on_load(source, options.rounding, matrices - maker.tables, maker.heads, can_keep)


def _quantized_layouts(files: ModelFiles, layout: TensorLayout) -> dict[str, QuantizedLayout]:
    """How the folder's own weights are quantised, if it has any: by name."""
    folder = files.path
    if not folder.is_dir() or not any(folder.glob("*.safetensors")) or read_quantization(files.config()) is None:
        return {}
    checkpoint = files.checkpoint()
    take_apart(checkpoint.tensors, layout.stacks, dict(layout.shapes), checkpoint.label)
    stored = [name for name in layout.shapes if name in checkpoint.tensors]
    return {name: kind for name in stored if (kind := checkpoint[name].quantized) is not None}
