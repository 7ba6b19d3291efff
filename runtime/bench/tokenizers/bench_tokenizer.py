"""`bench tokenizer`: encoding and decoding in one thread, beside `tokenizers` and `tiktoken` where they are installed.

Everything runs in one process, the sides in turns. What a side gives for a text is compared with ours right before it
is timed: ids that differ stop the run, but for tiktoken, which is left out for that tokenizer and says so. Loading is
measured in processes of their own, since what a library leaves in memory is part of it.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runtime.bench.environment import describe_machine
from runtime.bench.metrics import BenchmarkError, check_finite
from runtime.bench.tokenizers.sides import LOADERS, Side, installed
from tokenizer import IncrementalDecoder, Tokenizer

PROMPT_CHARACTERS = 400
_PROMPT_REPEATS = 200  # a prompt is timed so many times in a row, for the clock's sake
_MOST_CHARACTERS = 1_000_000  # of a text


def default_texts() -> dict[str, str]:
    """English prose and code, of the Python that runs this: its language reference and its standard library."""
    from pydoc_data.topics import topics

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = "".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)
    return {"prose": "\n".join(topics.values()), "code": code}


def tokenizer_rows(
    files: Sequence[Path], texts: Mapping[str, str] | None = None, num_rounds: int = 7
) -> list[dict[str, Any]]:
    """What `bench peers` shows of tokenizers: one row for each tokenizer.json and text, and one for a short prompt.

    A row: "tokenizer", "work", "unit" ("MB/s", or "us" for the prompt, where less is better), for each side that is
    there "median", "min" and "max" under its name, and "ratio", ours against the better of the others, above 1 where
    ours is faster. Raises `BenchmarkError` where ids differ.
    """
    rows = []
    for file in files:
        sides, left_out = _load(file, list(LOADERS))
        for work, text in (texts or default_texts()).items():
            rows.append(_encode_row(sides, work, text[:_MOST_CHARACTERS], num_rounds, left_out))
        prose = next(iter((texts or default_texts()).values()))
        rows.append(_prompt_row(sides, file, prose, num_rounds, left_out))
        rows[-1]["left_out"] = dict(left_out)
        for row in rows:
            row.setdefault("tokenizer", file.parent.name)
    return rows


def bench_tokenizer(
    files: Sequence[Path],
    *,
    texts: Mapping[str, str] | None = None,
    num_rounds: int = 7,
    long_characters: int = 1_000_000,
    loads: int = 3,
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All of it: `rows` (`tokenizer_rows`), `decoding`, `scaling` (ours, texts that are hard to encode) and `loading`.

    long_characters   of the longest hard text; the shortest has a tenth
    loads             processes that load each tokenizer, one after the other
    """
    for file in files:
        if not file.is_file():
            raise BenchmarkError(f"there is no {file}")
    if num_rounds < 1 or loads < 1:
        raise BenchmarkError("--num-rounds and --loads must be at least 1")
    report_progress("encoding")
    report: dict[str, Any] = {"num_rounds": num_rounds, "rows": tokenizer_rows(files, texts, num_rounds)}
    prose = next(iter((texts or default_texts()).values()))[:_MOST_CHARACTERS]
    report_progress("decoding")
    report["decoding"] = [_decode_row(file, prose, num_rounds) for file in files]
    report_progress("long texts without words")
    report["scaling"] = [row for file in files for row in _scaling_rows(file, long_characters)]
    report_progress("loading")
    report["loading"] = [_loading_row(file, loads) for file in files]
    report["environment"] = {"model": "", "dtype": "", "device": "cpu", **describe_machine()}
    for part in ("rows", "decoding", "scaling", "loading"):
        for row in report[part]:
            check_finite(row)
    return report


def _load(file: Path, names: Sequence[str]) -> tuple[list[Side], dict[str, str]]:
    """The sides that can read the file, ours first, and why others are left out."""
    sides, left_out = [], {}
    for name in names:
        side = LOADERS[name](file) if name in installed() else None
        if side is None:
            left_out[name] = "is not installed" if name not in installed() else "cannot express this tokenizer"
        else:
            sides.append(side)
    return sides, left_out


def _verified(
    sides: list[Side], what: str, run: Callable[[Side], Sequence[int]], left_out: dict[str, str]
) -> dict[str, Callable[[], object]]:
    """What each side does, after it has given our ids."""
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


def _in_turns(works: Mapping[str, Callable[[], object]], num_rounds: int, repeats: int = 1) -> dict[str, list[float]]:
    """Seconds of each work, one a round; who begins changes from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            work = works[name]
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            seconds[name].append((time.perf_counter() - start) / repeats)
    return seconds


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _encode_row(
    sides: list[Side], work: str, text: str, num_rounds: int, left_out: dict[str, str]
) -> dict[str, Any]:
    works = _verified(sides, work, lambda side: side.encode(text), left_out)
    megabytes = len(text.encode()) / 1e6
    seconds = _in_turns(works, num_rounds)
    rates = {name: _spread([megabytes / each for each in seconds[name]]) for name in works}
    best = max((rates[name]["median"] for name in rates if name != "ours"), default=None)
    ratio = {} if best is None else {"ratio": rates["ours"]["median"] / best}
    return {"work": f"encode, {work}", "unit": "MB/s", "bytes": len(text.encode()), **rates, **ratio}


def _prompt_row(
    sides: list[Side], file: Path, prose: str, num_rounds: int, left_out: dict[str, str]
) -> dict[str, Any]:
    text = chat_like_prompt(file, prose)
    works = _verified(sides, "the prompt", lambda side: side.prompt(text), left_out)
    seconds = _in_turns(works, num_rounds, _PROMPT_REPEATS)
    times = {name: _spread([1e6 * each for each in seconds[name]]) for name in works}
    best = min((times[name]["median"] for name in times if name != "ours"), default=None)
    ratio = {} if best is None else {"ratio": best / times["ours"]["median"]}
    return {"work": f"encode, a prompt of {len(text)} characters", "unit": "us", **times, **ratio}


def chat_like_prompt(file: Path, prose: str) -> str:
    """400 characters: prose between two of the tokenizer's special tokens, where it has some."""
    added = [token["content"] for token in json.loads(file.read_bytes())["added_tokens"] if token["special"]]
    opening, closing = (added[1], added[2]) if len(added) > 2 else ("", "")
    before, after = f"{opening}user\n", f"{closing}\n{opening}assistant\n"
    size = PROMPT_CHARACTERS - len(before) - len(after)
    return before + prose[size : 2 * size] + after


def _decode_row(file: Path, text: str, num_rounds: int) -> dict[str, Any]:
    """MB/s of whole decodings, and what one id costs when ids come one by one."""
    sides, left_out = _load(file, list(LOADERS))
    ids = list(sides[0].encode(text))
    expected = sides[0].decode(ids)
    works: dict[str, Callable[[], object]] = {}
    for side in sides:
        if side.decode(ids) == expected:
            works[side.name] = partial(side.decode, ids)
        else:
            left_out[side.name] = "gives another text"
    seconds = _in_turns(works, num_rounds)
    megabytes = len(expected.encode()) / 1e6
    rates = {name: _spread([megabytes / each for each in seconds[name]]) for name in works}
    tokenizer = Tokenizer.from_file(file)

    def one_by_one() -> str:
        decoder = IncrementalDecoder(tokenizer)
        return "".join([decoder.push((token_id,)) for token_id in ids]) + decoder.flush()

    if one_by_one() != expected:
        raise BenchmarkError("decoding one by one gives another text")
    each = _in_turns({"ours": one_by_one}, num_rounds)["ours"]
    return {
        "tokenizer": file.parent.name,
        "work": "decode",
        "unit": "MB/s",
        **rates,
        "one_by_one_us": statistics.median(each) / len(ids) * 1e6,
        "left_out": left_out,
    }


def hard_texts(size: int) -> dict[str, str]:
    """Texts of `size` characters in which merging has most to do."""
    source = random.Random(0)
    letters = "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=size))
    frequent = "".join(source.choices(("th", "he", "in", "er", "an", "the", "ing", "tion"), k=size))[:size]
    return {
        "one character": "a" * size,
        "no spaces": letters,
        "frequent pairs, no spaces": frequent,
        "spaces": " " * size,
        "line ends and spaces": ("\n" + " " * 99) * (size // 100),
    }


def _scaling_rows(file: Path, longest: int) -> list[dict[str, Any]]:
    tokenizer = Tokenizer.from_file(file)
    rows = []
    for name in hard_texts(1000):
        microseconds = []
        for size in (longest // 10, longest):
            text = hard_texts(size)[name]
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                ids = tokenizer.encode_ordinary(text)
                seconds.append(time.perf_counter() - start)
            if tokenizer.decode(ids).lstrip(" ") != text.lstrip(" "):
                raise BenchmarkError(f"{name}: the ids do not decode to the text")
            microseconds.append(min(seconds) / size * 1e6)
        rows.append(
            {
                "tokenizer": file.parent.name,
                "work": name,
                "characters": [longest // 10, longest],
                "us_per_character": microseconds,
                "growth": microseconds[1] / microseconds[0],
            }
        )
    return rows


def _loading_row(file: Path, loads: int) -> dict[str, Any]:
    """Seconds and private memory until the first word is encoded, of a process that did nothing else."""
    row: dict[str, Any] = {"tokenizer": file.parent.name, "file_bytes": file.stat().st_size}
    for name in installed():
        reports = []
        for _ in range(loads):
            command = [sys.executable, "-m", "runtime.bench.tokenizers.load", name, str(file.resolve())]
            root = Path(__file__).resolve().parents[3]
            done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False, encoding="utf-8")
            if done.returncode:
                raise BenchmarkError(f"loading with {name} failed: {done.stderr.strip().splitlines()[-1:]}")
            reports.append(json.loads(done.stdout))
        if all(report["num_ids"] for report in reports):
            row[name] = {key: statistics.median(report[key] for report in reports) for key in reports[0]}
    return row


def as_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for a person."""
    lines = [f"{'':<46}{'ours':>10}{'tokenizers':>12}{'tiktoken':>10}{'ratio':>8}   ours from … to"]
    for row in (*report["rows"], *report["decoding"]):
        cells = [f"{row[name]['median']:.1f}" if name in row else "-" for name in ("ours", "tokenizers", "tiktoken")]
        ratio = f"{row['ratio']:.1f}x" if "ratio" in row else ""
        title = f"{row['tokenizer']}: {row['work']} ({row['unit']})"
        spread = f"{row['ours']['min']:.1f} … {row['ours']['max']:.1f}"
        lines.append(f"{title:<46}{cells[0]:>10}{cells[1]:>12}{cells[2]:>10}{ratio:>8}   {spread}")
        if "one_by_one_us" in row:
            lines.append(f"  one id after the other: {row['one_by_one_us']:.2f} us each")
        lines += [f"  {name} {why}" for name, why in row.get("left_out", {}).items()]
    for row in report["scaling"]:
        small, large = row["us_per_character"]
        what = f"{row['tokenizer']}: {row['work']}"
        lines.append(f"{what:<46}{small:.3f} us a character, {large:.3f} when ten times as long: {row['growth']:.2f}x")
    for row in report["loading"]:
        for name in ("ours", "tokenizers", "tiktoken"):
            if name in row:
                load, memory = row[name]["load_s"] + row[name]["first_encode_s"], row[name]["private_bytes"] / 1e6
                lines.append(f"{row['tokenizer']}: {name} loads in {load:.2f} s and holds {memory:.0f} MB")
    lines.append(f"{report['environment']['cpu']}, one thread, medians of {report['num_rounds']} rounds")
    return lines
