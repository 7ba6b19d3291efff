"""A mixture of experts in place of a dense decoder's MLP.

    routing = route(router(x));   y = sum over chosen experts of weight * down(f(gate(x)) * up(x))  [+ shared MLP]

The router is a small map that is not quantised.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, cast

from models.checkpoints.stacked import Order
from models.configuration.config import ModelConfig
from models.configuration.json_fields import Fields
from models.decoder import Decoder, DecoderConfig, FeedForward, Layer, NormKind, PreNormLayer
from models.errors import ModelLoadError
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.linear.linear import Linear
from runtime.linear.norm import RmsNorm
from runtime.routing import Routing, RoutingRule
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm:
    """A family's experts: their structure, and their maps' names in a checkpoint.

    Attributes:
        under: the name that a layer's experts stand under.
        router, gate_up, down: the maps' names; without a gate the second is up's alone.
        has_bias: whether router and experts have biases.
        activation: between an expert's maps, and the shared one's; "squared_relu" has no gate.
        latent: the names of the maps before and after the experts, which see rows of `latent_size` columns alone.
        shared: the shared expert's name; shared_down: its second map's name; shared_stack: the name of its first two
            maps if stored as one; shared_is_beside: the shared expert stands in the layer, not under `under`.
        has_shared_gate: whether it is multiplied by a gate.
        correction: the vector that is added to scores for the choice alone; "" if there is none.
        correction_rows: it is stored as a matrix of so many rows; 0 if it is a vector.
        stack_order: how all experts' maps share a tensor, where they are stored as one, as transformers 5 can save any
            family's.
        stacks: these tensors' names.
    """

    under: str = "mlp"
    router: str = "gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    has_bias: bool = False
    activation: ops.ExpertsActivation = "silu"
    shared: str = "shared_expert"
    has_shared_gate: bool = True
    correction: str = ""
    correction_rows: int = 0
    stack_order: Order = "in_runs"
    stacks: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    shared_stack: str = ""
    shared_down: str = "down_proj"
    shared_is_beside: bool = False
    latent: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """A decoder with experts.

    Attributes:
        expert_size: columns of an expert between its maps; `intermediate_size` is that of layers without experts.
        rule: how a token's experts are chosen.
        dense_layers: numbers of the layers that have an MLP instead.
        shared_size: columns of the shared expert; 0 if there is none.
        latent_size: columns of the experts' rows; 0 if they are the model's.
        qk_norm: of queries and keys, as `Attention` takes it.
        num_prediction_layers: layers after the model's own that predict further tokens (`models.drafters.mtp`).
    """

    expert_size: int
    rule: RoutingRule
    dense_layers: frozenset[int] = frozenset()
    shared_size: int = 0
    latent_size: int = 0
    qk_norm: NormKind = "none"
    num_prediction_layers: int = 0

    @property
    def split_widths(self) -> tuple[str, ...]:
        """See `ModelConfig`. Experts are split by their columns; the width of an MLP counts where a layer has one."""
        return ("expert_size", "shared_size", *(("intermediate_size",) if self.dense_layers else ()))


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """The names, in a checkpoint, of the parts that predict further tokens (`models.drafters.mtp`).

    Attributes:
        under: begins all of them; "" for those of the layer after the model's.
        embed_norm, hidden_norm, projection, norm: of its own parts.
        layers: begin those of the family's layers.
    """

    under: str = ""
    embed_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    layers: tuple[str, ...] = ("",)
    norm: str = "shared_head.norm"


class MoeDecoder(Decoder):
    """A decoder whose layers have experts, but for the dense ones.

    Attributes:
        predicts_apart: the names of what predicts further tokens, where checkpoints do not have it after the layers.
    """

    config: MoeConfig
    form = ExpertsForm()
    predicts_apart: PredictionNames | None = None

    @classmethod
    def harmless_tensors(cls, config: ModelConfig) -> re.Pattern[str]:
        """Also those of the layers that predict further tokens, which a drafter reads."""
        own = cast(MoeConfig, config)
        if not own.num_prediction_layers:
            return cls.harmless
        numbers = (str(own.num_layers + each) for each in range(own.num_prediction_layers))
        return re.compile(rf"{cls.harmless.pattern}|{re.escape(cls.root)}\.layers\.({'|'.join(numbers)})\..*")

    def prediction_config(self) -> MoeConfig:
        """The config of the layer that predicts further tokens: one layer like the last, with experts."""
        config = self.config
        return replace(
            config, num_layers=1, layer_windows=config.layer_windows[-1:], layer_ropes=config.layer_ropes[-1:],
            attention_scales=config.attention_scales[-1:], dense_layers=frozenset(),
        )  # fmt: skip

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, attention={"norm": self.config.qk_norm})

    def feed_forward(self, index: int, maker: Maker, *, input_norm: str = "", **choices: Any) -> FeedForward:
        if index in self.config.dense_layers:
            return self.mlp(maker, input_norm=input_norm, **choices)
        norm = self.input_norm(maker, input_norm)
        beside = maker if self.form.shared_is_beside else None
        return Experts(self.config, maker.under(self.form.under), self.form, norm, beside=beside)


def _plain(order: Order) -> Order:
    """That of a stack of one tensor an expert."""
    return "outputs_first" if order == "outputs_first" else "in_runs"


class Experts:
    """A router, its experts and perhaps a shared one, after a norm if there is one."""

    def __init__(
        self, config: MoeConfig, maker: Maker, form: ExpertsForm, norm: RmsNorm | None, *, beside: Maker | None = None
    ) -> None:
        """`beside` makes a shared expert that does not stand under the others."""
        hidden, inner, count = config.hidden_size, config.shard("expert_size"), config.rule.num_experts
        width = config.latent_size or hidden
        self.communicator, self.is_exact = maker.options.communicator, maker.options.exact
        num_ranks = maker.options.num_ranks
        if self.is_exact and width % num_ranks:
            name = "moe_latent_size" if config.latent_size else "hidden_size"
            raise ModelLoadError(
                f"{config.architecture}: {name} = {width} of experts cannot be split over {num_ranks} ranks in"
                " exact mode"
            )
        self.rule, self.norm, self.activation = config.rule, norm, form.activation
        self.router = maker.router(form.router, outputs=count, inputs=hidden, has_bias=form.has_bias)
        self.gate_up = maker.experts(
            form.gate_up, count=count, outputs=(inner,) * len(form.gate_up), inputs=width, has_bias=form.has_bias,
            stack=form.stacks[0], stack_order=form.stack_order, split="outputs",
        )  # fmt: skip
        # Sums of experts have no segments: in exact mode a rank makes some columns of them whole.
        self.down = maker.experts(
            form.down, count=count, outputs=width // num_ranks if self.is_exact else width,
            inputs=inner.whole if self.is_exact else inner, has_bias=form.has_bias,
            stack=form.stacks[1], stack_order=_plain(form.stack_order),
            split="outputs" if self.is_exact else "inputs",
        )  # fmt: skip
        self.latent: list[Linear] = []
        if config.latent_size:
            self.latent = [
                maker.linear(name, outputs=outputs, inputs=inputs, has_bias=config.mlp_bias)
                for name, outputs, inputs in zip(form.latent, (width, hidden), (hidden, width))
            ]
        self.shared: SharedExpert | None = None
        if config.shared_size:
            self.shared = SharedExpert(config, beside or maker, form)
        self.correction: Tensor | None = None
        if form.correction:
            stored = (form.correction_rows, count) if form.correction_rows else None
            self.correction = maker.exact_vector(form.correction, count, stored=stored)

    def __call__(self, x: Tensor, batch: Batch, *, residual: Tensor | None = None) -> Tensor:
        is_router_adapted = batch.adapters is not None and self.router.has_addends
        if self.norm is not None and not is_router_adapted:
            x, routing = ops.normed_route(x, self.norm, self.router.weight, self.rule, self.correction)
        else:
            x = x if self.norm is None else ops.rms_norm(x, self.norm.weight, self.norm.eps)
            routing = ops.route(self.router.logits(x, adapters=batch.adapters), self.rule, self.correction)
        if self.latent:
            inward, outward = self.latent
            if self.shared is not None:
                residual = self.shared.down(self.shared.between(x, batch), batch, residual=residual)
            return outward(self._sum(inward(x, batch), routing, batch), batch, residual=residual)
        shared, gate = (None, None) if self.shared is None else self.shared(x, batch)
        return self._sum(x, routing, batch, shared, gate, residual)

    def _sum(
        self, x: Tensor, routing: Routing, batch: Batch, shared: Tensor | None = None, gate: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The chosen experts' results of all ranks, plus the others."""
        adder = None if self.is_exact else self.communicator
        if adder is not None and adder.rank:
            residual = None  # rank 0 adds it
        gather = self._gather if self.is_exact and self.communicator is not None else None
        added: dict[str, Tensor | None] = {"shared": shared, "shared_gate": gate, "residual": residual}
        addends = [each.addend for each in (self.gate_up, self.down) if each.addend is not None]
        is_adapted = batch.adapters is not None and any(each.pairs is not None for each in addends)
        if is_adapted or (addends and self.is_exact and x.device.kind != "cpu"):  # the same kernels for each row
            result = ops.adapted_experts(
                x, routing, self.gate_up, self.down, self.activation, batch, **added, gather=gather
            )
        else:
            result = ops.experts(x, routing, self.gate_up, self.down, self.activation, **added, gather=gather)
        if adder is not None:
            adder.all_reduce(result)
            result.deferred_norm = None  # were those of this rank's part
        return result

    def _gather(self, x: Tensor, columns: int) -> Tensor:
        assert self.communicator is not None, "there are several ranks"
        return self.communicator.all_gather_columns(x, columns // self.communicator.num_ranks, columns)


class SharedExpert:
    """The shared expert, and its gate, if it has one."""

    def __init__(self, config: MoeConfig, maker: Maker, form: ExpertsForm) -> None:
        hidden, inner = config.hidden_size, config.shard("shared_size")
        under = maker.under(form.shared)
        has_bias, self.is_exact = config.mlp_bias, maker.options.exact
        self.activation: ops.ExpertsActivation = form.activation if form.activation == "squared_relu" else "silu"
        gate_up = ("up_proj",) if self.activation == "squared_relu" else ("gate_proj", "up_proj")
        if form.shared_stack:
            under.note_row_stack(form.shared_stack, gate_up, (inner.whole, inner.whole), hidden, has_bias=has_bias)
        sizes = (inner,) * len(gate_up)
        self.gate_up = under.linear(gate_up, outputs=sizes, inputs=hidden, has_bias=has_bias, split="outputs")
        self.down = under.linear(form.shared_down, outputs=hidden, inputs=inner, has_bias=has_bias, split="inputs")
        self.gate: Linear | None = None
        if form.has_shared_gate:
            self.gate = maker.router(f"{form.shared}_gate", outputs=1, inputs=hidden)

    def __call__(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The result for ``x [T, H]``, whole in exact mode, else this rank's part of the sum; and its gate
        ``[T, 1]``."""
        between = self.between(x, batch)
        made = self.down(between, batch) if self.is_exact else self.down.own_part(between, batch)
        return made, None if self.gate is None else self.gate(x, batch)

    def between(self, x: Tensor, batch: Batch) -> Tensor:
        """The inputs of its second map, `[T, I]`."""
        if self.activation == "squared_relu":
            inner = self.gate_up(x, batch)
            return ops.squared_relu(inner, out=inner)
        return self.gate_up.glu(x, self.activation, batch)


def dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """The dense layers by Qwen's fields: those of `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    step = fields.integer("decoder_sparse_step", 1)
    named = fields.integers("mlp_only_layers")
    return frozenset(index for index in range(num_layers) if index in named or (index + 1) % step)


def read_rule(fields: Fields, *, count: int, top_k: int, normalises: bool) -> RoutingRule:
    """A softmax over all experts, by the fields that most routers have; the numbers are transformers' defaults.
    `num_experts` and `num_local_experts` are one field's two names."""
    names = [name for name in ("num_experts", "num_local_experts") if fields.has(name)]
    count_name = (names or ["num_experts"])[0]
    for name in names[1:]:
        fields.expect(name, fields.integer(count_name))
    count = fields.integer(count_name, count, most=1 << 16)
    chosen = fields.integer("num_experts_per_tok", top_k)
    if chosen > count:
        raise fields.error("num_experts_per_tok", f"= {chosen} must be at most {count_name} = {count}")
    return RoutingRule(num_experts=count, top_k=chosen, normalises=normalises)


def check_groups(fields: Fields, *, count: int, top_k: int, groups: int, best: int) -> None:
    """Checks that `top_k` of `count` experts can be chosen within the `best` of so many groups. Raises ConfigError."""
    for name, value, limit, of in (
        ("n_group", groups, count, "n_routed_experts"), ("topk_group", best, groups, "n_group"),
        ("num_experts_per_tok", top_k, count // groups * best, "the experts of topk_group groups"),
    ):  # fmt: skip
        if value > limit:
            raise fields.error(name, f"= {value} must be at most {of} = {limit}")
    if count % groups:
        raise fields.error("n_group", f"= {groups} must divide n_routed_experts = {count}")
