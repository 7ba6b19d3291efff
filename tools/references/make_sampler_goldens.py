"""llama.cpp's samplers on random logits, for `tests/numba_kernels/test_sampler_goldens.py`: what each keeps, and the
logits of these afterwards.

    python -m tools.references.make_sampler_goldens VOCABULARY.gguf FILE.npz

needs llama-cpp-python, and a vocabulary for the breakers of DRY. Every value comes from the library.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

SIZES = 1, 2, 7, 33, 257, 521
BREAKERS = ["\n", ":", '"', "*", "User:", "the end"]
# The library's top-n-sigma leaves tokens of -inf in place: a typical-p after it computes NaN from them, and a dynamic
# temperature counts them as candidates. These two are not chained here.
CHAINS: list[dict[str, float]] = [
    {"typical_p": 0.2}, {"typical_p": 0.5}, {"typical_p": 0.9}, {"typical_p": 0.995},
    {"top_n_sigma": 0.5}, {"top_n_sigma": 1.0}, {"top_n_sigma": 2.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02}, {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    {"xtc_probability": 1.0, "xtc_threshold": 0.5}, {"xtc_probability": 1.0, "xtc_threshold": 0.51},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"temperature": 1.0, "dynatemp_range": 0.5}, {"temperature": 0.8, "dynatemp_range": 0.8, "dynatemp_exponent": 2.0},
    {"temperature": 1.5, "dynatemp_range": 1.0, "dynatemp_exponent": 0.5},
    {"temperature": 1.5, "dynatemp_range": 0.3, "dynatemp_exponent": 0.0},
    {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05},
    {
        "top_k": 20, "typical_p": 0.9, "top_p": 0.95, "min_p": 0.02, "xtc_probability": 1.0, "xtc_threshold": 0.1,
        "temperature": 0.7, "dynatemp_range": 0.3,
    },
    {"top_n_sigma": 2.0, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "temperature": 0.7},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
]  # fmt: skip


def chain_of(numbers: dict[str, float]) -> Iterator[Any]:
    """Samplers in the order of the library's default chain."""
    get = numbers.get
    if "top_n_sigma" in numbers:
        yield llama_cpp.llama_sampler_init_top_n_sigma(get("top_n_sigma"))
    if "top_k" in numbers:
        yield llama_cpp.llama_sampler_init_top_k(int(numbers["top_k"]))
    if "typical_p" in numbers:
        yield llama_cpp.llama_sampler_init_typical(get("typical_p"), 0)
    if "top_p" in numbers:
        yield llama_cpp.llama_sampler_init_top_p(get("top_p"), 0)
    if "min_p" in numbers:
        yield llama_cpp.llama_sampler_init_min_p(get("min_p"), 0)
    if "xtc_probability" in numbers:
        yield llama_cpp.llama_sampler_init_xtc(get("xtc_probability"), get("xtc_threshold"), 0, 1)
    if "temperature" in numbers:
        spread, exponent = get("dynatemp_range", 0.0), get("dynatemp_exponent", 1.0)
        yield llama_cpp.llama_sampler_init_temp_ext(get("temperature"), spread, exponent)


def applied(samplers: list[Any], logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """The logits that are left, -inf for dropped tokens, and the id that a sampler selected, or -1."""
    (ids,) = np.isfinite(logits).nonzero()
    data = (llama_cpp.llama_token_data * len(ids))()
    for entry, token in zip(data, ids.tolist()):
        entry.id, entry.logit, entry.p = token, float(logits[token]), 0.0
    array = llama_cpp.llama_token_data_array(data=data, size=len(ids), selected=-1, sorted=False)
    for sampler in samplers:
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    left = np.full(len(logits), -np.inf, np.float32)
    for i in range(array.size):
        left[array.data[i].id] = array.data[i].logit
    return left, array.data[array.selected].id if array.selected >= 0 else -1


def made_logits(rng: np.random.Generator, size: int) -> Iterator[NDArray[np.float32]]:
    """Wide and narrow ones, some with -inf; no two are equal, since the library's order of equals is its own."""
    for scale in (0.5, 3.0):
        logits = (rng.standard_normal(size) * scale).astype(np.float32)
        yield logits
    if size > 8:
        logits = logits.copy()
        logits[::3] = -np.inf
        yield logits


def filters(add: Callable[..., None], rng: np.random.Generator) -> None:
    for size in SIZES:
        made = list(made_logits(rng, size))
        for logits in made if size < 500 else made[-1:]:
            assert len(np.unique(logits[np.isfinite(logits)])) == np.isfinite(logits).sum()
            rows = [applied(list(chain_of(numbers)), logits)[0] for numbers in CHAINS]
            add("filters", logits=logits, left=np.stack(rows))


def mirostat(add: Callable[..., None], rng: np.random.Generator) -> None:
    """Steps of one state: what the library kept with the mu so far, and what it drew."""
    for size, tau, eta in ((2, 1.0, 0.5), (33, 3.0, 0.1), (257, 5.0, 0.1), (257, 0.5, 1.0), (521, 4.0, 0.3)):
        sampler = llama_cpp.llama_sampler_init_mirostat_v2(7, tau, eta)
        steps = [(rng.standard_normal(size) * 2).astype(np.float32) for _ in range(12)]
        found = [applied([sampler], logits) for logits in steps]
        add("mirostat", numbers={"mirostat_tau": tau, "mirostat_eta": eta}, logits=np.stack(steps),
            left=np.stack([left for left, _ in found]), drawn=np.array([drawn for _, drawn in found]))  # fmt: skip


def dry(add: Callable[..., None], rng: np.random.Generator, model: Any) -> None:
    """The penalties after texts of few tokens, with the texts of breakers as the library reads them."""
    vocab = llama_cpp.llama_model_get_vocab(model)
    size = llama_cpp.llama_vocab_n_tokens(vocab)
    texts = [b"a the end", b" b\n", b"User: hello", b"a User: b a User: b", b"one two:", b"x y z end the end of the en"]
    pieces: list[int] = []
    for text in texts:
        ids = (llama_cpp.llama_token * 64)()
        count = llama_cpp.llama_tokenize(vocab, text, len(text), ids, 64, False, False)
        pieces += ids[:count]
    for i in range(60):
        few = rng.choice(np.array(pieces), 1 + i % 9)
        history = few[rng.integers(0, len(few), int(rng.integers(0, 90)))].astype(np.int32)
        multiplier, base = float(rng.choice([0.5, 0.8, 3.0])), float(rng.choice([1.0, 1.75, 2.5]))
        allowed, last_n = int(rng.integers(0, 4)), int(rng.choice([8, 40, 200]))
        given = [] if i % 3 == 0 else BREAKERS
        breakers = (ctypes.c_char_p * len(given))(*(text.encode() for text in given))
        sampler = llama_cpp.llama_sampler_init_dry(vocab, multiplier, base, allowed, last_n, breakers, len(given))
        for token in history.tolist():
            llama_cpp.llama_sampler_accept(sampler, token)
        left, _ = applied([sampler], np.zeros(size, np.float32))
        (ids,) = left.nonzero()
        numbers = {"dry_multiplier": multiplier, "dry_base": base, "dry_allowed_length": allowed}
        add("dry", numbers=numbers | {"dry_penalty_last_n": last_n}, breakers=given, history=history,
            ids=ids.astype(np.int32), penalties=-left[ids])  # fmt: skip
    add("dry_vocabulary", size=size, tokens={str(i): token_text(vocab, i) for i in sorted(set(pieces))})


def token_text(vocab: Any, token: int) -> str:
    buffer = ctypes.create_string_buffer(64)
    count = llama_cpp.llama_token_to_piece(vocab, token, buffer, 64, 0, True)
    return buffer.raw[:count].decode()


def main(vocabulary: Path, target: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    cases: list[dict[str, Any]] = []

    def add(kind: str, **values: Any) -> None:
        case: dict[str, Any] = {"kind": kind}
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                arrays[f"{len(cases)}.{name}"] = value
            else:
                case[name] = value
        cases.append(case)

    rng = np.random.default_rng(11)
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(vocabulary).encode(), params)
    filters(add, rng)
    mirostat(add, rng)
    dry(add, rng, model)
    described = {"chains": CHAINS, "cases": cases, "llama_cpp_python": llama_cpp.__version__}
    np.savez_compressed(target, described=np.frombuffer(json.dumps(described).encode(), np.uint8), **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
