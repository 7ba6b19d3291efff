"""The host's rows of `bench peers`: mapping a safetensors file, packing compared with copying, and encoding.

Encoding runs in one thread, compared with `tokenizers` and `tiktoken` if installed: all sides in one process, in turns,
made of one `tokenizer.json`. tiktoken uses ids as ranks, so its ids are right only if the vocabulary has the order of
the merges. Each side's ids for a text are compared with ours right before timing: differing ids stop the run, except
tiktoken's, which is left out for that tokenizer with a note.
"""

from __future__ import annotations

import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from models.checkpoints.weight_files import open_checkpoint
from runtime import ops
from runtime.bench.metrics import BenchmarkError, interleaved, timed
from runtime.bench.peers.report import host_row
from runtime.tensor.tensor import Tensor
from tokenizer import Tokenizer
from tokenizer.byte_level import from_byte_level
from tokenizer.components.pre_tokenizers import GPT2_PATTERN


def bench_load(folder: Path, num_rounds: int) -> dict[str, Any]:
    """Milliseconds until every tensor of the folder's checkpoint is a view, with the file's pages cached.

    Each round opens and checks the file anew and takes a view of each tensor; none of the data is touched.
    """
    file = folder / "model.safetensors"
    _read_whole(file)
    seconds = []
    num_tensors = 0
    for _ in range(num_rounds):
        start = time.perf_counter()
        checkpoint = open_checkpoint(folder)
        views = [checkpoint[name].array() for name in checkpoint.tensors]
        seconds.append(time.perf_counter() - start)
        num_tensors = len(views)
        if sum(view.nbytes for view in views) + (1 << 20) < file.stat().st_size:
            raise BenchmarkError(f"the views of {file.name} hold less than the file")
    size = file.stat().st_size
    milliseconds = 1e3 * statistics.median(seconds)
    said = f"{size / 1e6:.0f} MB, {num_tensors} tensors"
    return host_row("load", milliseconds, said=said, file_bytes=size, num_tensors=num_tensors)


def bench_pack(folder: Path, num_rounds: int) -> dict[str, Any]:
    """The time of packing every matrix of the folder's checkpoint into panels, as a multiple of copying the same bytes.

    Both read the mapped file, whose pages are cached but not mapped when they begin, and write new memory; a tensor's
    source and result are released before the next. `resident_mapped_bytes` is the resident part of the file in this
    process after packing.
    """
    _read_whole(folder / "model.safetensors")
    num_bytes, resident_bytes = 0, None

    def spent(make: Callable[[np.ndarray[Any, Any]], Any]) -> float:
        nonlocal num_bytes, resident_bytes
        checkpoint, seconds, num_bytes = open_checkpoint(folder), 0.0, 0
        for name in checkpoint.tensors:
            array = checkpoint[name].array()
            if array.ndim == 2:
                array = array.T if ".c_" in name else array  # GPT-2 stores its maps as [in, out]
                seconds += timed(make, array)()
                num_bytes += array.nbytes
                del array
                checkpoint[name].release()
        if make is _pack:
            resident_bytes = mapped_bytes(folder / "model.safetensors")
        return seconds

    works = {"pack": partial(spent, _pack), "copy": partial(spent, np.copy)}
    pack_s, copy_s = map(statistics.median, interleaved(works, num_rounds, warm_ups=1).values())
    return host_row(
        "pack",
        pack_s / copy_s,
        said=f"{pack_s:.3f} s, copying {copy_s:.3f} s, {num_bytes / 1e6:.0f} MB",
        pack_s=pack_s,
        copy_s=copy_s,
        matrix_bytes=num_bytes,
        resident_mapped_bytes=resident_bytes,
    )


def mapped_bytes(path: Path) -> int | None:
    """Bytes of a mapped file that are resident in this process (Linux; None elsewhere)."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return None
    resident, is_within = 0, False
    for line in smaps.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_within = line.endswith(str(path.resolve()))
        elif is_within and words[0] == "Rss:":
            resident += int(words[1]) * 1024
    return resident


def _pack(array: np.ndarray[Any, Any]) -> Any:
    return ops.prepare_linear(Tensor.from_numpy(array))


def _read_whole(path: Path) -> None:
    """Reads the file once, so that its pages are cached."""
    with path.open("rb") as file:
        while os.read(file.fileno(), 16 << 20):
            pass


PROMPT_CHARACTERS = 400
_PROMPT_REPEATS = 200  # a prompt is timed so many times in a row, for the clock's resolution
_MOST_CHARACTERS = 1_000_000  # of a text
NAMES = ("ours", "tokenizers", "tiktoken")


@dataclass(frozen=True, slots=True)
class Side:
    """One implementation, loaded.

    encode   text → ids, without special tokens
    prompt   text → ids, with the special tokens in the text, without added ones
    """

    name: str
    encode: Callable[[str], Sequence[int]]
    prompt: Callable[[str], Sequence[int]]


def load_ours(file: Path) -> Side:
    """This project's."""
    tokenizer = Tokenizer.from_file(file)
    prompt = partial(tokenizer.encode, add_special_tokens=False)
    return Side("ours", tokenizer.encode_ordinary, prompt)


def load_tokenizers(file: Path) -> Side:
    """Hugging Face's."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return Side("tokenizers", encode, encode)


def load_tiktoken(file: Path) -> Side | None:
    """OpenAI's, or None for a tokenizer that it cannot express: more than one pattern, or no byte-level words."""
    import tiktoken

    content = json.loads(file.read_bytes())
    pattern = _one_pattern(content["pre_tokenizer"])
    if pattern is None:
        return None
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab = content["model"]["vocab"]
    ranks = {from_byte_level(token): token_id for token, token_id in vocab.items() if token not in added}
    encoding = tiktoken.Encoding(file.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=added)
    return Side("tiktoken", encoding.encode_ordinary, lambda text: encoding.encode(text, allowed_special="all"))


LOADERS: dict[str, Callable[[Path], Side | None]] = {
    "ours": load_ours,
    "tokenizers": load_tokenizers,
    "tiktoken": load_tiktoken,
}


def installed() -> list[str]:
    """The names of the sides that can be loaded here."""
    return [name for name in NAMES if name == "ours" or find_spec(name) is not None]


def _one_pattern(fields: Any) -> str | None:
    """The pattern of the words, in the common syntax of tokenizer.json and tiktoken."""
    steps = fields["pretokenizers"] if fields and fields["type"] == "Sequence" else [fields]
    if steps[0] and steps[0]["type"] == "ByteLevel" and len(steps) == 1:
        is_plain = steps[0].get("use_regex", True) and not steps[0]["add_prefix_space"]
        return GPT2_PATTERN if is_plain else None
    if len(steps) == 2 and steps[0]["type"] == "Split" and steps[1]["type"] == "ByteLevel":
        regex = steps[0]["pattern"].get("Regex")
        return str(regex) if regex and not steps[1].get("use_regex", True) else None
    return None


def default_texts() -> dict[str, str]:
    """English prose and code of the running Python: its language reference and its standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = "".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)
    return {"prose": "\n".join(topics.values()), "code": code}


def tokenizer_rows(file: Path, texts: Mapping[str, str] | None = None, num_rounds: int = 7) -> list[dict[str, Any]]:
    """One row for each text that a tokenizer.json encodes, and one for a short prompt.

    A row: "tokenizer", "work", "unit" ("MB/s", or "us" for the prompt, where less is better), for each available side
    "median", "min" and "max" under its name, and "ratio", ours against the better of the others, above 1 if ours is
    faster. Raises `BenchmarkError` if ids differ.
    """
    if not file.is_file():
        raise BenchmarkError(f"there is no {file}")
    sides, left_out = _load(file)
    chosen = texts or default_texts()
    rows = [_encode_row(sides, work, text[:_MOST_CHARACTERS], num_rounds, left_out) for work, text in chosen.items()]
    rows.append(_prompt_row(sides, file, next(iter(chosen.values())), num_rounds, left_out))
    rows[-1]["left_out"] = dict(left_out)
    return [{**row, "tokenizer": file.parent.name} for row in rows]


def _load(file: Path) -> tuple[list[Side], dict[str, str]]:
    """The sides that can read the file, ours first, and the reasons for the others."""
    sides, left_out = [], {}
    for name in NAMES:
        side = LOADERS[name](file) if name in installed() else None
        if side is None:
            left_out[name] = "is not installed" if name not in installed() else "cannot express this tokenizer"
        else:
            sides.append(side)
    return sides, left_out


def _verified(
    sides: list[Side], what: str, run: Callable[[Side], Sequence[int]], left_out: dict[str, str]
) -> dict[str, Callable[[], object]]:
    """Each side's encode functions, verified against our ids."""
    expected = list(run(sides[0]))
    works: dict[str, Callable[[], object]] = {}
    for side in sides:
        if side.name in left_out:
            continue
        if list(run(side)) == expected:
            works[side.name] = partial(run, side)
        elif side.name == "tiktoken":
            left_out[side.name] = f"gives other ids for {what}"
        else:
            raise BenchmarkError(f"{what}: {side.name} gives other ids than ours")
    return works


def _encode_row(sides: list[Side], work: str, text: str, num_rounds: int, left_out: dict[str, str]) -> dict[str, Any]:
    works = _verified(sides, work, lambda side: side.encode(text), left_out)
    num_bytes, seconds = (
        len(text.encode()),
        interleaved({name: timed(work) for name, work in works.items()}, num_rounds),
    )
    rates = {name: [num_bytes / 1e6 / each for each in seconds[name]] for name in works}
    return {**_row(f"encode, {work}", "MB/s", rates), "bytes": num_bytes}


def _prompt_row(sides: list[Side], file: Path, prose: str, num_rounds: int, left_out: dict[str, str]) -> dict[str, Any]:
    text = chat_like_prompt(file, prose)
    works = _verified(sides, "the prompt", lambda side: side.prompt(text), left_out)
    seconds = interleaved({name: timed(work, repeats=_PROMPT_REPEATS) for name, work in works.items()}, num_rounds)
    times = {name: [1e6 * each for each in seconds[name]] for name in works}
    return _row(f"encode, a prompt of {len(text)} characters", "us", times)


def _row(work: str, unit: str, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Each side's spread, and ours against the best of the others: more is better, except for microseconds."""
    medians = {name: statistics.median(each) for name, each in values.items()}
    spreads = {name: {"median": medians[name], "min": min(each), "max": max(each)} for name, each in values.items()}
    ours, ratio = medians.pop("ours"), {}
    if medians:
        others = medians.values()
        ratio["ratio"] = min(others) / ours if unit == "us" else ours / max(others)
    return {"work": work, "unit": unit, **spreads, **ratio}


def chat_like_prompt(file: Path, prose: str) -> str:
    """400 characters: prose between two of the tokenizer's special tokens, if it has some."""
    added = [token["content"] for token in json.loads(file.read_bytes())["added_tokens"] if token["special"]]
    opening, closing = (added[1], added[2]) if len(added) > 2 else ("", "")
    before, after = f"{opening}user\n", f"{closing}\n{opening}assistant\n"
    size = PROMPT_CHARACTERS - len(before) - len(after)
    return before + prose[size : 2 * size] + after
