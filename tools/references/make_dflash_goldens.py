"""Writes the logits of z-lab's and DeepSpec's tiny DFlash and DSpark drafters for given hidden states.

    python -m tools.references.make_dflash_goldens     # needs torch, transformers, and both repositories on PYTHONPATH

Each case of `tests/models/drafters/dflash_cases.py` becomes `tests/models/drafters/dflash/CASE.npz`: for each number of
known hidden states, all of them computed at once, the logits of the block after them. z-lab's model gets windows and
causality as a mask, in float64; DSpark samples greedily, and its logits include the bias of the previous token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
from dflash.model import DFlashDraftModel
from transformers import Qwen3Config

from tests.models.drafters.dflash_cases import CASES, FOLDER, NUM_TOKENS, draft_tensors, given, target_tensors


def main() -> None:
    torch.set_default_dtype(torch.float64)
    FOLDER.mkdir(exist_ok=True)
    for case, fields in CASES.items():
        is_dspark = case == "dspark"
        config = Qwen3Config(**{name: value for name, value in fields.items() if name != "torch_dtype"})
        config._attn_implementation = "eager"
        tensors = {name: torch.from_numpy(array.astype(np.float64)) for name, array in draft_tensors(fields).items()}
        model: Any = (Qwen3DSparkModel if is_dspark else DFlashDraftModel)(config).double().eval()
        model.load_state_dict(tensors)
        ends = draft_tensors(fields) if is_dspark else target_tensors()
        prefix = "" if is_dspark else "model."
        table = torch.from_numpy(ends[f"{prefix}embed_tokens.weight"].astype(np.float64))
        head = torch.from_numpy(ends["lm_head.weight"].astype(np.float64))
        states, token_ids = given(case)
        size, found, drawn = model.block_size, [], []
        window = fields.get("sliding_window") or fields.get("dflash_config", {}).get("swa_window_size")
        for column in range(NUM_TOKENS):
            start = column + 1
            ids = torch.full((1, size), int(model.mask_token_id))
            ids[0, 0] = int(token_ids[column])
            keys, rows = torch.arange(start + size)[None], torch.arange(start, start + size)[:, None]
            sees = torch.ones((size, start + size), dtype=torch.bool)
            if window:
                sees &= keys > rows - window
            if case == "dflash_causal":
                sees &= keys <= rows
            mask = torch.where(sees, 0.0, -torch.inf)[None, None]
            known = torch.from_numpy(states[:start].astype(np.float64))[None]
            both: dict[str, Any] = {"noise_embedding": table[ids], "attention_mask": mask, "position_ids": keys}
            with torch.no_grad():
                if is_dspark:
                    x = model._forward_backbone(target_hidden_states=known, **both)
                    tokens, logits = model.sample_draft_tokens(
                        x @ head.T, first_prev_token_ids=ids[:, 0], hidden_states=x
                    )
                    drawn.append(tokens[0].numpy().astype(np.int32))
                else:
                    logits = (model(target_hidden=known, **both) @ head.T)[:, 1:]
                    drawn.append(logits[0].argmax(-1).numpy().astype(np.int32))
            found.append(logits[0].float().numpy())
        path = FOLDER / f"{case}.npz"
        np.savez_compressed(path, logits=np.stack(found), token_ids=np.stack(drawn))
        print(case, np.stack(found).shape, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
