"""Reads from a folder in sentence-transformers' layout how its model embeds and scores.

`modules.json` lists what follows the model: a Pooling, Dense layers, Normalize. `config_sentence_transformers.json` has
prompts and a cross-encoder's activation, `sentence_bert_config.json` the longest text. Names are looked up in tables;
nothing is imported. Read off sentence-transformers 6.2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.base import Model
from models.checkpoints.model_files import open_model
from models.checkpoints.safetensors_file import SafetensorsFile
from models.checkpoints.weight_files import SINGLE_FILE
from models.configuration.config import ModelConfig
from models.encoder import BothWays, EncoderConfig
from models.errors import ConfigError
from models.gguf.model_file import GgufModel
from models.head import Dense, Stage
from runtime.pooling import SPAN_LABELS, Pooling, PoolingInfo, ScoreActivation, normalized, poolings_of

_POOLINGS: dict[str, Pooling] = {
    "cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean", "lasttoken": "last",
}  # fmt: skip
_OLDER_MODES = {
    f"pooling_mode_{name}": mode
    for name, mode in (
        ("cls_token", "cls"), ("max_tokens", "max"), ("mean_tokens", "mean"), ("mean_sqrt_len_tokens",) * 2,
        ("weightedmean_tokens", "weightedmean"), ("lasttoken", "lasttoken"),
    )
}  # fmt: skip
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
    "GELU": "erf",
}
_SCORE_ACTIVATIONS: dict[str, ScoreActivation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}

_STORED = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True, slots=True)
class SentenceLayout:
    """`stages` follow the pooling. `max_tokens`: of the longest text, or None. `pools_prompt`: whether the tokens of a
    prompt are pooled, too. `is_declared`: the folder names its modules. `pair_template`: a GGUF file's text of a query
    and a document. `chat_options`: arguments of the chat template."""

    pooling: str | None = None
    stages: tuple[Stage, ...] = ()
    size: int | None = None
    normalize: bool = False
    max_tokens: int | None = None
    prompts: dict[str, str] | None = None
    default_prompt: str = ""
    pools_prompt: bool = True
    score_token_ids: tuple[int, ...] = ()
    is_declared: bool = False
    pair_template: str = ""
    chat_options: dict[str, Any] | None = None


def read_layout(folder: Path) -> SentenceLayout:
    """The layout of a model's folder, or what a GGUF file says of it. Raises `ConfigError` that names file and
    field."""
    if isinstance(files := open_model(folder), GgufModel):
        maps = files.embedding_maps()
        size = len(maps[-1]) if maps else None
        return SentenceLayout(files.pooling(), tuple(map(Dense, maps)), size, pair_template=files.pair_template())
    modules = _read(folder / "modules.json")
    if modules is None:
        return SentenceLayout()
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ConfigError(f"{folder / 'modules.json'}: must be a list of modules")
    pooling: str | None = None
    stages: list[Stage] = []
    size, pools_prompt = None, True
    score_token_ids: tuple[int, ...] = ()
    for number, module in enumerate(modules):
        where = f"{folder / 'modules.json'}: [{number}]"
        kind, path = _kind(module, where), _inside(folder, module, where)
        if kind == "Transformer":
            if path != folder:
                raise ConfigError(
                    f'{where}: path = {module["path"]!r:.80} must be "": move that folder\'s files up to modules.json'
                )
        elif kind == "Pooling":
            pooling, pools_prompt = _read_pooling(path / "config.json")
        elif kind == "Dense":
            dense = _read_dense(path)
            stages.append(dense)
            size = len(dense.weight)
        elif kind == "Normalize":
            _check_names(_read_object(path / "config.json"), path / "config.json")
            stages.append(normalized)
        elif kind == "LogitScore":
            score_token_ids = _read_logit_score(path / "config.json")
        elif kind not in ("Dropout",):
            raise ConfigError(
                f"{where}: the module {kind} is not implemented; known are Transformer, Pooling, Dense, Normalize and"
                " Dropout"
            )
    ends_normalized = bool(stages) and stages[-1] is normalized
    if ends_normalized:  # after the vector is cut
        del stages[-1]
    given = _read_object(folder / "config_sentence_transformers.json")
    bert = _read_object(folder / "sentence_bert_config.json")
    most = bert.get("max_seq_length")
    if most is None:
        given_length = _read_object(folder / "tokenizer_config.json").get("model_max_length")
        most = given_length if type(given_length) is int and 0 < given_length < 1 << 30 else None
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(
            f"{folder / 'sentence_bert_config.json'}: max_seq_length = {most!r:.80} must be an integer above 0"
        )
    prompts = given.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        raise ConfigError(f"{folder / 'config_sentence_transformers.json'}: prompts must be texts by name")
    default = given.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise ConfigError(
            f"{folder / 'config_sentence_transformers.json'}: default_prompt_name = {default!r:.80} is not among"
            f" prompts ({', '.join(prompts)})"
        )
    processing = bert.get("processing_kwargs") or {}
    options = (processing.get("chat_template") or {}) if isinstance(processing, dict) else None
    if not isinstance(options, dict):
        raise ConfigError(
            f"{folder / 'sentence_bert_config.json'}: processing_kwargs and its chat_template must be objects"
        )
    options = {name: value for name, value in options.items() if name != "restore_suffix"}
    return SentenceLayout(
        pooling, tuple(stages), size, ends_normalized, most, prompts, default, pools_prompt, score_token_ids,
        is_declared=True, chat_options=options,
    )  # fmt: skip


def score_tokens(
    config: ModelConfig, layout: SentenceLayout, folder: Path, ids_of: Callable[[str], list[int]]
) -> tuple[int, ...]:  # fmt: skip
    """The ids whose logits score a pair, by the folder's layout, the config, or the model's name; none for a model that
    does not rank so. ``ids_of`` encodes a token's text. Raises `ConfigError`."""
    if layout.score_token_ids:
        return layout.score_token_ids
    texts = config.score_tokens
    if not texts and config.architecture in PAIR_TEMPLATES and _RERANKER.search(str(folder)):
        texts = ("no", "yes")
    found = []
    for text in texts:
        ids = ids_of(text)
        if len(ids) != 1:
            raise ConfigError(f"{folder}: classifier_from_token: {text!r:.80} is {len(ids)} tokens, must be one")
        found += ids
    return tuple(found)


_RERANKER = re.compile(r"qwen3[^/]*reranker", re.IGNORECASE)
"""In the path of a folder or of a hub's copy: the published models' config.json does not tell them from generators."""

PAIR_TEMPLATES = {
    "Qwen3ForCausalLM": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
        ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n"
        "<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
}
"""A pair's prompt by architecture: Qwen3-Reranker's, as its model card has it."""


def pooling_info(model: Model, folder: Path, layout: SentenceLayout) -> PoolingInfo:
    """How a model from a folder of that layout embeds and classifies."""
    config = model.config
    is_encoder, encoder = isinstance(model, BothWays), config if isinstance(config, EncoderConfig) else None
    labels = config.labels if model.classifier is not None else ()
    template: tuple[str, ...] = ()
    chat: dict[str, Any] | None = None
    if model.score_token_ids:
        labels, template = ("relevance",), PAIR_TEMPLATES.get(config.architecture, ())
        if layout.score_token_ids and _has_pair_roles(folder):
            template, chat = (), layout.chat_options
        elif not template:
            raise ConfigError(
                f"{folder}: {config.architecture} scores pairs by tokens' logits, but its prompt is not known; known"
                f" are those of {', '.join(PAIR_TEMPLATES)}"
            )
    if layout.pair_template and labels:
        template = _parts_of_template(layout.pair_template, folder)
    token_labels: tuple[str, ...] = ()
    if config.labels_tokens:
        labels, token_labels = (), labels
    elif labels and encoder is None and not model.score_token_ids:  # a decoder's head reads any token's hidden state
        token_labels = labels
    named = labels or token_labels
    own: Pooling = "last" if encoder is None else encoder.pooling
    return PoolingInfo(
        generates=model.generates,
        pooling=layout.pooling or ("mean" if is_encoder and not labels else own),
        head_pooling=own,
        normalize=layout.normalize or not layout.is_declared,
        size=layout.size or config.hidden_size * len(poolings_of(layout.pooling or own)),
        prompts=layout.prompts or {},
        default_prompt=layout.default_prompt,
        pools_prompt=layout.pools_prompt,
        labels=labels,
        token_labels=token_labels,
        activation=score_activation(folder, named) if named and named != SPAN_LABELS else "identity",
        reads_types=encoder is not None and encoder.type_vocab_size > 1 and _gives_types(folder),
        pair_template=template,
        pair_chat=chat,
    )


def _gives_types(folder: Path) -> bool:
    """Whether the tokenizer tells the second of two texts by its tokens' types, as transformers 5 has it."""
    config = _read(folder / "tokenizer_config.json")
    fields = config if isinstance(config, dict) else {}
    if isinstance(names := fields.get("model_input_names"), list):
        return "token_type_ids" in names
    return fields.get("tokenizer_class") not in ("TokenizersBackend", "PreTrainedTokenizerFast")


def _has_pair_roles(folder: Path) -> bool:
    """Whether the chat template knows the roles of a pair that sentence-transformers gives it."""
    files = open_model(folder).tokenizer_files()
    template = "" if files is None else files.chat_templates.get("default", "")
    return all(re.search(rf"""["']{role}["']""", template) for role in ("query", "document"))


def _parts_of_template(text: str, folder: Path) -> tuple[str, str, str]:
    """A pair's prompt in three parts: a document that is cut loses its own end, not the prompt's."""
    before, query, rest = text.partition("{query}")
    between, document, after = rest.partition("{document}")
    if not query or not document:
        raise ConfigError(f"{folder}: tokenizer.chat_template.rerank = {text!r:.80} lacks {{query}} and {{document}}")
    return "", f"{before}{query}{between}{document}", after


def score_activation(folder: Path, labels: tuple[str, ...]) -> ScoreActivation:
    """The activation of a classifier's scores: by the folder's files, else that of the kind of problem."""
    config = _read_object(folder / "config.json")
    inner = config.get("sentence_transformers")
    names = (
        _read_object(folder / "config_sentence_transformers.json").get("activation_fn"),
        inner.get("activation_fn") if isinstance(inner, dict) else None,
        config.get("sbert_ce_default_activation_function"),
    )
    for name in names:
        if name is None:
            continue
        kind = str(name).rpartition(".")[2].removesuffix("()")
        if not str(name).startswith("torch.nn.") or kind not in _SCORE_ACTIVATIONS:
            raise ConfigError(
                f"{folder}: the scores' activation is {name!r:.80}; known are torch.nn's "
                f"{', '.join(_SCORE_ACTIVATIONS)}"
            )
        return _SCORE_ACTIVATIONS[kind]
    problem = config.get("problem_type")
    if len(labels) == 1:
        return "identity" if problem == "regression" else "sigmoid"
    kinds: dict[Any, ScoreActivation] = {"multi_label_classification": "sigmoid", "regression": "identity"}
    return kinds.get(problem, "softmax")


def _read(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    found = _read(file)
    if not isinstance(found, dict | None):
        raise ConfigError(f"{file}: must be a JSON object, not {found!r:.80}")
    return found or {}


def _kind(module: dict[str, Any], where: str) -> str:
    kind = module.get("type")
    if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
        raise ConfigError(f"{where}: type = {kind!r:.80} is not a module of sentence_transformers; its code is not run")
    return kind.rpartition(".")[2]


def _inside(folder: Path, module: dict[str, Any], where: str) -> Path:
    path = module.get("path", "")
    if not isinstance(path, str) or not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{where}: path = {path!r:.80} leads out of the folder")
    return folder / path if path else folder


def _read_pooling(file: Path) -> tuple[str, bool]:
    """The poolings' names, and whether a prompt's tokens are pooled, too."""
    fields = _read(file)
    if not isinstance(fields, dict):
        raise ConfigError(f"{file}: is missing, or is no object")
    given = fields.get("pooling_mode")
    modes = [given] if isinstance(given, str) else list(given or ())
    if not modes:
        modes = [mode for name, mode in _OLDER_MODES.items() if fields.get(name)] or ["mean"]
    if not all(mode in _POOLINGS for mode in modes) or len(set(modes)) != len(modes):
        known = ", ".join(_POOLINGS)
        raise ConfigError(
            f"{file}: pooling_mode = {', '.join(map(str, modes))!r:.80} must be some of {known}, each once"
        )
    includes = fields.get("include_prompt", True)
    if not isinstance(includes, bool):
        raise ConfigError(f"{file}: include_prompt = {includes!r:.80} must be true or false")
    return "+".join(_POOLINGS[mode] for mode in modes), includes


def _check_names(fields: dict[str, Any], file: Path) -> None:
    """Raises ``ConfigError`` if a module reads or writes something else than a text's vector."""
    for field in ("module_input_name", "module_output_name"):
        if fields.get(field, "sentence_embedding") != "sentence_embedding":
            raise ConfigError(f"{file}: {field} = {fields[field]!r:.80} must be 'sentence_embedding'")


def _read_logit_score(file: Path) -> tuple[int, ...]:
    fields = _read_object(file)
    ids = [fields.get(name) for name in ("false_token_id", "true_token_id")]
    if type(ids[1]) is not int or not (ids[0] is None or type(ids[0]) is int):
        raise ConfigError(
            f"{file}: true_token_id and false_token_id must be token ids, not {ids[1]!r:.40}, {ids[0]!r:.40}"
        )
    return tuple(each for each in ids if each is not None)


def _read_dense(folder: Path) -> Dense:
    fields = _read(folder / "config.json")
    if not isinstance(fields, dict):
        raise ConfigError(f"{folder / 'config.json'}: is missing, or is no object")
    name = str(fields.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = name.rpartition(".")[2]
    if not name.startswith("torch.nn.") or kind not in _ACTIVATIONS:
        raise ConfigError(
            f"{folder / 'config.json'}: activation_function = {name!r:.80}; known are torch.nn's "
            f"{', '.join(_ACTIVATIONS)}"
        )
    _check_names(fields, folder / "config.json")
    path = folder / SINGLE_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: is missing; a pickle is not read: save the layer as safetensors")
    file = SafetensorsFile(path)
    if odd := [f"{name} ({entry.dtype})" for name, entry in file.tensors.items() if entry.dtype not in _STORED]:
        raise ConfigError(f"{path}: {odd[0]} must be of {', '.join(_STORED)}")
    shape = fields.get("out_features"), fields.get("in_features")
    arrays = {name: np.array(file.array(name), np.float32) for name in file.tensors}
    weight, bias = arrays.get("linear.weight"), arrays.get("linear.bias")
    if weight is None or weight.shape != shape or (bias is None) == bool(fields.get("bias", True)):
        raise ConfigError(f"{path}: must hold linear.weight {list(shape)}, and linear.bias as config.json says")
    residual = arrays.get("residual.weight")
    has_residual = bool(fields.get("use_residual"))
    if (residual is not None) != (has_residual and shape[0] != shape[1]) or (
        residual is not None and residual.shape != shape
    ):
        raise ConfigError(f"{path}: must hold residual.weight {list(shape)} if use_residual is true and sizes differ")
    return Dense(weight, bias, _ACTIVATIONS[kind], residual=residual, adds_input=has_residual and residual is None)
