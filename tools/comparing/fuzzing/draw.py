"""Parts that random configurations are drawn from."""

from __future__ import annotations

import random
from typing import Any

Fields = dict[str, Any]


class Draw:
    """Draws the families' fields. On an emulated device layers are few, and sizes for which a kernel is compiled."""

    def __init__(self, rng: random.Random, is_emulated: bool) -> None:
        self.rng = rng
        self.is_emulated = is_emulated
        self.choice, self.integer = rng.choice, rng.randint

    def flip(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def head_dim(self, step: int = 2) -> int:
        if self.is_emulated:
            return self.choice((16, 16, 18, 24, 64))
        return self.choice((8, 16, 24, 32, 40, 64, 80, 96, 128, step * self.integer(1, 40)))

    def kernel_size(self, least: int, most: int) -> int:
        """A size for which a kernel is compiled."""
        if self.is_emulated:
            return self.choice([size for size in (7, 16, 36) if least <= size <= most])
        return self.integer(least, most)

    def heads(self) -> Fields:
        kv_heads = self.choice((1, 1, 2, 2, 3, 5))
        return {"num_attention_heads": kv_heads * self.choice((1, 2, 3, 4, 7)), "num_key_value_heads": kv_heads}

    def decoder(self, *, has_head_dim: bool, is_divided: bool = False, step: int = 2) -> Fields:
        """Fields of every decoder; with `has_head_dim` its heads have a width of their own."""
        fields = {
            "vocab_size": self.integer(30, 420),
            "num_hidden_layers": self.integer(1, 2 if self.is_emulated else 4),
            "intermediate_size": self.choice((1, self.integer(2, 8), *(self.integer(17, 260) for _ in range(6)))),
            "max_position_embeddings": self.integer(128, 200),
            "rms_norm_eps": self.choice((1e-6, 1e-5, 1e-3)),
            "tie_word_embeddings": self.flip(),
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **self.heads(),
        }
        head_dim = self.head_dim(step)
        while head_dim * fields["num_attention_heads"] > 400 and fields["num_attention_heads"] > 1:
            fields.update(self.heads())
        if has_head_dim:
            hidden_size = self.integer(1, 24) if self.flip(0.1) else self.integer(24, 160)
            if is_divided:  # required by some classes all the same
                hidden_size = fields["num_attention_heads"] * max(1, hidden_size // fields["num_attention_heads"])
            return {**fields, "head_dim": head_dim, "hidden_size": hidden_size}
        return {**fields, "hidden_size": head_dim * fields["num_attention_heads"]}

    def rope(self, *, has_scaling: bool = True, is_entry: bool = False) -> Fields:
        """An entry of a layer type has no `truncate`: transformers does not read it there."""
        theta = {"rope_theta": self.choice((100.0, 1e4, 5e5, 1e6))}
        kind = self.choice(("default", "default", "linear", "llama3", "yarn")) if has_scaling else "default"
        if kind == "default":
            return {"rope_type": kind, **theta}
        scaled = {"rope_type": kind, **theta, "factor": self.choice((1.5, 2.0, 8.0, 32.0))}
        if kind == "linear":
            return scaled
        scaled["original_max_position_embeddings"] = self.integer(8, 100)
        if kind == "llama3":
            return {**scaled, "low_freq_factor": 1.0, "high_freq_factor": self.choice((2.0, 4.0))}
        extra = self.choice(
            ({}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 0.7}, {"truncate": False},
             {"mscale": 1.0, "mscale_all_dim": 0.7})
        )  # fmt: skip
        return {**scaled, **({} if is_entry and "truncate" in extra else extra)}

    def window(self) -> int:
        return self.choice((1, 2, 7, 8, 16, 17, 33, 100))

    def layer_types(self, num_layers: int) -> list[str]:
        return [self.choice(("full_attention", "sliding_attention")) for _ in range(num_layers)]
