"""Writes what transformers' assistants of tiny Gemma 4 models propose after prompts.

    python -m tools.references.make_assistant_goldens          # needs torch and transformers

Each case of `tests/models/drafters/assistant_cases.py` becomes a file in `tests/models/drafters/assistant`: for each
number of known tokens of a golden prompt, the logits of the next steps, each after the token that the step before likes
best. The assistant gets the last token's embedding, the model's last hidden state before it, and its keys and values:
in layers with a window as many as the window has. Weights are generated from their seeds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from tests.models.drafters.assistant_cases import (
    FOLDER,
    LENGTHS,
    NUM_STEPS,
    TARGETS,
    assistant_config,
    assistant_tensors,
    target_config,
)
from tests.models.folders import golden_tensors, load_golden


def load(model: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The model with these tensors, all of which it has, and no others but tied ones."""
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    kept = {name for name in missing if name != "lm_head.weight" and "inv_freq" not in name}
    known = [name for name in unknown if not any(part in name for part in ("k_proj", "v_proj", "k_norm"))]
    assert not [*kept, *known], (kept, known)
    model.tie_weights()
    return model.eval()


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for case, name in TARGETS.items():
        golden, given = load_golden(name), target_config(case)
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        target = load(
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), **options), golden_tensors(golden)
        )
        fields = {key: value for key, value in assistant_config(case).items() if key != "architectures"}
        config = Gemma4AssistantConfig(**fields)
        config._attn_implementation = "eager"
        assistant = load(Gemma4AssistantForCausalLM(config), assistant_tensors(case))
        ids = torch.tensor([golden.prompt_ids])
        window = given["sliding_window"]
        logits = np.full((len(LENGTHS), NUM_STEPS, given["vocab_size"]), np.nan, np.float32)
        token_ids = np.zeros((len(LENGTHS), NUM_STEPS), np.int32)
        with torch.no_grad():
            for place, length in enumerate(LENGTHS):
                out = target(
                    ids[:, : length - 1], use_cache=False, output_hidden_states=True, return_shared_kv_states=True
                )
                states = dict(out.shared_kv_states)
                states["sliding_attention"] = tuple(each[:, :, -window:] for each in states["sliding_attention"])
                hidden, last = out.hidden_states[-1][:, -1:], ids[:, length - 1 : length]
                for step in range(NUM_STEPS):
                    made = assistant(
                        inputs_embeds=torch.cat([target.get_input_embeddings()(last), hidden], -1),
                        position_ids=torch.tensor([[length - 1]]), shared_kv_states=states,
                    )  # fmt: skip
                    logits[place, step] = made.logits[0, 0].numpy()
                    last, hidden = made.logits.argmax(-1), made.last_hidden_state
                    token_ids[place, step] = int(last)
        assert np.isfinite(logits).all()
        np.savez_compressed(FOLDER / f"{case}.npz", logits=logits, token_ids=token_ids)
        print(case, token_ids[-1], (FOLDER / f"{case}.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
