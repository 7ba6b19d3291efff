"""Writes what transformers and sentence-transformers make of the cases of `tests/models/encoder_cases.py`.

    python -m tools.references.make_encoder_goldens    # needs torch, transformers and sentence-transformers

`tests/models/encoders` gets the tokenizer, a WordPiece of 300 tokens, the shapes of the cases' tensors, and
`outputs.npz`: hidden states or labels' scores of the ids, alone and as a pair, vectors of each layout, scores of pairs.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.models.encoder_cases import (
    CASES,
    FOLDER,
    IDS,
    LAYOUTS,
    LENGTHS,
    LONG,
    OF_TOKENS,
    QUERY,
    SECOND_FROM,
    TEXTS,
    TOKENIZER,
    long_ids,
    long_rows,
    long_shapes,
    long_types,
    tensors_of,
    with_class,
    write_encoder,
    write_layout,
)
from tests.models.gguf.encoder_twins import write_logit_score

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    if not TOKENIZER.is_file():  # trained anew it has other ids
        write_tokenizer()
    outputs: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    for case, fields in (CASES | OF_TOKENS).items():
        model_class: Any = getattr(transformers, fields["architectures"][0])
        config = transformers.AutoConfig.for_model(**fields)
        model = model_class._from_config(config, attn_implementation="eager").float().eval()
        state = model.state_dict()
        shapes[case] = {name: list(tensor.shape) for name, tensor in state.items() if tensor.is_floating_point()}
        model.load_state_dict(
            {name: torch.from_numpy(each) for name, each in tensors_of(shapes[case]).items()}, strict=False
        )
        ids = torch.tensor([IDS])
        with torch.no_grad():
            outputs[case] = _result(model(input_ids=ids))
            if fields["model_type"] == "bert":
                types = (torch.arange(len(IDS)) >= SECOND_FROM).long()[None]
                outputs[f"{case} pair"] = _result(model(input_ids=ids, token_type_ids=types))
    (FOLDER / "shapes.json").write_text(json.dumps(shapes) + "\n", encoding="utf-8")
    for case, fields in CASES.items():
        outputs |= _long(case, fields)
    with tempfile.TemporaryDirectory() as scratch:
        for name in LAYOUTS:
            folder = with_class(write_layout(Path(scratch) / name, name), "BertTokenizer")
            model = SentenceTransformer(str(folder), device="cpu")
            outputs[f"layout {name}"] = model.encode(TEXTS)
            outputs[f"layout {name} document"] = model.encode(TEXTS, prompt_name="document")
        for case in ("bert_pairs", "xlm_roberta_pairs"):
            folder = write_encoder(Path(scratch) / case, case)
            kind = "BertTokenizer" if case == "bert_pairs" else "PreTrainedTokenizerFast"  # the latter makes no types
            model = CrossEncoder(str(with_class(folder, kind)), device="cpu")
            outputs[f"scores {case}"] = model.predict([(QUERY, text) for text in TEXTS])
        folder = with_class(write_encoder(Path(scratch) / "untyped", "bert_pairs"), "TokenizersBackend")
        untyped = CrossEncoder(str(folder), device="cpu").predict([(QUERY, text) for text in TEXTS])
        outputs["scores bert_pairs without types"] = untyped
        folder = with_class(write_encoder(Path(scratch) / "bert_spans", "bert_spans"), "BertTokenizer")
        asked = transformers.AutoTokenizer.from_pretrained(folder)(
            [QUERY] * 2, TEXTS[:2], return_tensors="pt", padding=True
        )
        answering = transformers.BertForQuestionAnswering.from_pretrained(folder).eval()
        with torch.no_grad():
            for number, length in enumerate(asked["attention_mask"].sum(dim=1).tolist()):
                own = {name: each[number : number + 1, :length] for name, each in asked.items()}
                outputs[f"spans {number}"] = _result(answering(**own))
        model = CrossEncoder(str(write_logit_score(Path(scratch) / "logit_score")), device="cpu")
        outputs["scores logit_score"] = model.predict([(QUERY, text) for text in TEXTS])
    arrays: dict[str, Any] = {name: np.asarray(each, np.float32) for name, each in outputs.items()}
    np.savez_compressed(FOLDER / "outputs.npz", **arrays)


def _long(case: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Rows of the hidden states of texts of `LENGTHS` tokens, by a model with more positions."""
    config = transformers.AutoConfig.for_model(**(fields | LONG))
    model_class: Any = getattr(transformers, fields["architectures"][0])
    model = model_class._from_config(config, attn_implementation="eager").float().eval()
    tensors = {name: torch.from_numpy(each) for name, each in tensors_of(long_shapes(case)).items()}
    model.load_state_dict(tensors, strict=False)
    base, found = getattr(model, model.base_model_prefix, model), {}
    for length in LENGTHS:
        ids = torch.tensor([long_ids(length)])
        with torch.no_grad():
            found[f"{case} {length}"] = long_rows(base(input_ids=ids).last_hidden_state[0].numpy())
            if fields["model_type"] == "bert":
                types = torch.from_numpy(long_types(length)).long()[None]
                hidden = base(input_ids=ids, token_type_ids=types).last_hidden_state
                found[f"{case} {length} pair"] = long_rows(hidden[0].numpy())
    return found


def _result(result: Any) -> Any:
    if hasattr(result, "start_logits"):
        return torch.stack([result.start_logits[0], result.end_logits[0]], dim=-1).numpy()
    return (result.logits if hasattr(result, "logits") else result.last_hidden_state)[0].numpy()


def write_tokenizer() -> None:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    texts = [*TEXTS, QUERY, "the where is fox lazy dog query passage jumps over worlds seconds being browner ünder"]
    made.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL))
    ids = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    made.save(str(TOKENIZER))


if __name__ == "__main__":
    main()
