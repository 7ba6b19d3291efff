"""The GGUF reader: the same as the `gguf` package's, and every malformed file refused with its numbers."""

from __future__ import annotations

import mmap
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from models.errors import WeightsError
from models.gguf.reader import GgufFile, Strings
from tests.models.gguf.files import random_blocks


def whole_file(path: Path) -> Path:
    """A file with a key of every type, and tensors of several."""
    writer = gguf.GGUFWriter(path, "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 7)
    writer.add_float32("a.float32", 1e-6)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "héllo")
    writer.add_array("a.strings", ["", "x", "▁the"] + [f"token {i}" for i in range(300)])
    writer.add_array("a.numbers", list(range(-50, 500)))
    writer.add_array("a.floats", [0.5, -1.25])
    writer.add_array("a.truths", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("f32", rng.standard_normal((3, 5)).astype(np.float32))
    writer.add_tensor("f16", rng.standard_normal(7).astype(np.float16))
    writer.add_tensor("q4_k", random_blocks(rng, Ggml.Q4_K, (4, 512)), raw_dtype=Ggml.Q4_K)
    writer.add_tensor("cube", rng.standard_normal((2, 3, 4)).astype(np.float32))
    writer.add_tensor("large", rng.standard_normal((64, 256)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_file(tmp_path_factory.mktemp("gguf") / "m.gguf")


def test_reads_what_the_gguf_package_reads(whole: Path) -> None:
    ours, theirs = GgufFile(whole), gguf.GGUFReader(whole)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        value, expected = ours.metadata[key], theirs.fields[key].contents()
        if isinstance(value, Strings | np.ndarray):
            assert len(value) == len(expected)
            assert list(value) == expected
        else:
            assert value == expected
            assert type(value) is type(expected)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.format.name, entry.begin) == (tensor.tensor_type.name, tensor.data_offset)
        assert entry.size_bytes == tensor.n_bytes
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.array(tensor.name), expected)


def test_floats_are_views_of_the_mapped_file(whole: Path) -> None:
    file = GgufFile(whole)
    array = file.array("large")
    file.release("large")
    file.release("f16")
    owner = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    assert isinstance(owner.obj if isinstance(owner, memoryview) else owner, mmap.mmap)
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, GgufFile(whole).array("large"))


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor_info(
    name: bytes = b"t", sizes: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, axes: int | None = None
) -> bytes:
    count = len(sizes) if axes is None else axes
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


def raw_file(keys: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3, **changes: Any) -> bytes:
    counts = changes.get("num_tensors", len(tensors)), changes.get("num_keys", len(keys))
    header = changes.get("magic", b"GGUF") + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


ONE = text(b"k") + struct.pack("<I", 4)
DATA = bytes(128)

MALFORMED: list[tuple[bytes, str]] = [
    (b"", "truncated: 0 bytes, less than the 24"),
    (raw_file([], [], magic=b"GGML"), "is no GGUF file: it begins with b'GGML'"),
    (raw_file([], [], version=1), "has version 1 of GGUF, but 2 and 3 are read; convert"),
    (raw_file([], [], version=3 << 24), "is big-endian, and only little-endian files are read"),
    (raw_file([], [], num_keys=2**63), "claims 9223372036854775808 keys of metadata, for which its 32 bytes"),
    (raw_file([], [], num_tensors=5), "claims 5 tensors, for which its 32 bytes have no room"),
    (raw_file([], [], bytes(1 << 23), num_keys=1 << 18), "claims 262144 keys of metadata"),
    (raw_file([struct.pack("<Q", 2**40) + bytes(16)], []), "name of key 0 has 1099511627776 bytes, more than 65535"),
    (raw_file([text(b"k") + struct.pack("<IQ", 8, 999)], []), "k claims 999 bytes, but 19 are left"),
    (raw_file([text(b"k" * 40)[:36]], []), "key 0 claims 40 bytes, but 32 are left"),
    (raw_file([text(b"\xff") + struct.pack("<II", 4, 1)], []), "key 0 is not UTF-8"),
    (raw_file([text(b"k") + struct.pack("<IQ", 8, 1) + b"\xff"], []), "k is not UTF-8"),
    (raw_file([ONE + bytes(4)] * 2, []), "has the key 'k' twice"),
    (raw_file([text(b"k") + struct.pack("<II", 13, 0)], []), "k is of the unknown type 13"),
    (raw_file([text(b"k\n\x1b") + struct.pack("<II", 13, 0)], []), r"k\\n\\x1b is of the unknown type 13"),
    (raw_file([text(b"k" * 60000) + struct.pack("<II", 13, 0)], []), "k{600}…$"),
    (raw_file([text(b"k") + struct.pack("<IB", 7, 2)], []), "k must be 0 or 1, not 2"),
    (raw_file([text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(12)], []), "k is a list of the type 9, must be"),
    (raw_file([text(b"k") + struct.pack("<IIQ", 9, 4, 2**61)], []), "k claims 2305843009213693952 numbers, but"),
    (raw_file([text(b"k") + struct.pack("<IIQ", 9, 8, 2**50)], []), "k claims 1125899906842624 strings, but"),
    (raw_file([text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 2**62)], []), "end inside of k"),
    (raw_file([text(b"k") + struct.pack("<IIQ", 9, 8, 2) + text(b"x" * 30)], [])[:72], "truncated: .* end inside of k"),
    (raw_file([text(b"k" * 10) + bytes(8)], [])[:44], "truncated: its 44 bytes end inside of k"),
    (raw_file([ONE], [])[:38], "k claims 1 numbers, but 1 bytes are left"),
    (
        raw_file([text(b"general.alignment") + struct.pack("<II", 4, 24)], [tensor_info()], DATA),
        "general.alignment must be a power of two, not 24",
    ),
    (raw_file([], [tensor_info(), tensor_info(offset=128)], DATA * 2), "has the tensor 't' twice"),
    (raw_file([], [tensor_info(name=b"n" * 65)], DATA), "the name of tensor 0 has 65 bytes, more than 64"),
    (raw_file([], [tensor_info(axes=5)], DATA), "tensor 't' has 5 axes, must be from 1 to 4"),
    (raw_file([], [tensor_info(sizes=())], DATA), "tensor 't' has 0 axes"),
    (raw_file([], [tensor_info(sizes=(0, 4))], DATA), r"tensor 't' has the sizes \[4, 0\], each must be at least 1"),
    (raw_file([], [tensor_info(sizes=(2**40, 2**40))], DATA), r"tensor 't' has the sizes .* all be below 2\^63"),
    (raw_file([], [tensor_info(sizes=(2**64 - 1,))], DATA), "tensor 't' has the sizes"),
    (
        raw_file([], [tensor_info(kind=15)], DATA),
        "'t' is Q8_K, which holds activations within a product, no weights; take",
    ),
    (
        raw_file([], [tensor_info(kind=26)], DATA),
        "'t' is I32, which holds integers, no weights; take the model in one of",
    ),
    (raw_file([], [tensor_info(kind=999)], DATA), "tensor 't' is of the unknown type 999, which is not read"),
    (raw_file([], [tensor_info(kind=12)], DATA), "tensor 't' has rows of 32, but blocks of Q4_K are of 256"),
    (raw_file([], [tensor_info(offset=32)], DATA), "tensor 't' is at byte 32 of the data, but should be at 0"),
    (raw_file([], [tensor_info(), tensor_info(b"u", offset=96)], DATA * 2), "'u' is at byte 96 .* should be at 128"),
    (raw_file([], [tensor_info()], DATA[1:]), "tensor 't' ends at byte 192 of 191; the file is truncated"),
    (raw_file([], [tensor_info(sizes=(2**40,))], DATA), "tensor 't' ends at byte 4398046511168 of 192"),
]


@pytest.mark.parametrize(("content", "message"), MALFORMED, ids=[message[:50] for _, message in MALFORMED])
def test_a_malformed_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="m.gguf: .*" + message) as caught:
        GgufFile(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_a_pointer(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"m.gguf: the file is missing"):
        GgufFile(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3087467144\n")
    with pytest.raises(WeightsError, match="is a Git LFS pointer"):
        GgufFile(tmp_path / "m.gguf")


def test_strings_are_decoded_when_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_file([text(b"k") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"\xff")], []))
    strings = GgufFile(path).metadata["k"]
    assert isinstance(strings, Strings)
    with pytest.raises(WeightsError, match=r"m.gguf: k\[1\] is not UTF-8"):
        list(strings)


def test_a_scale_that_is_not_finite(tmp_path: Path) -> None:
    block = struct.pack("<e", 1.0) + bytes(32)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_file([], [tensor_info(sizes=(64,), kind=8)], block + b"\x00\x7e" + b"\x01" * 32))
    with pytest.raises(WeightsError, match="tensor 't': block 1 has a scale that is not finite; the file is damaged"):
        GgufFile(path).array("t")


def _flip(raw: bytearray, rng: random.Random, end: int) -> None:
    raw[rng.randrange(end)] = rng.randrange(256)


def _cut(raw: bytearray, rng: random.Random, end: int) -> None:
    del raw[rng.randrange(end) :]


def _number(raw: bytearray, rng: random.Random, end: int) -> None:
    at = rng.randrange(end - 8)
    value = rng.choice([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, rng.randrange(2**64)])
    raw[at : at + 8] = struct.pack("<Q", value)


def _remove(raw: bytearray, rng: random.Random, end: int) -> None:
    at = rng.randrange(end)
    del raw[at : at + rng.randrange(1, 64)]


def _repeat(raw: bytearray, rng: random.Random, end: int) -> None:
    at, size = rng.randrange(end), rng.randrange(1, 64)
    raw[at:at] = raw[at : at + size]


MUTATIONS: list[Callable[[bytearray, random.Random, int], None]] = [_flip, _flip, _number, _number]
MUTATIONS += [_cut, _remove, _repeat]


def fuzz(whole: Path, path: Path, seeds: range) -> int:
    """Mutates the header; returns how many files were read all the same. None may fail otherwise than by refusing, or
    take more than four times its bytes of memory (and a page for Python's own)."""
    raw, header = whole.read_bytes(), GgufFile(whole).tensors["f32"].begin
    num_read, refusals = 0, list[str]()
    for seed in seeds:
        rng = random.Random(seed)
        content = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            rng.choice(MUTATIONS)(content, rng, min(header, max(9, len(content))))
        path.write_bytes(content)
        tracemalloc.start()
        try:
            file = GgufFile(path)
            for value in file.metadata.values():
                if isinstance(value, Strings):
                    for _ in value:
                        pass
            for name in file.tensors:
                file.raw(name)
            num_read += 1
        except WeightsError as error:
            refusals.append(str(error))
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert all(str(path) in refusal for refusal in refusals)
        refusals.clear()
        assert peak <= 4 * len(content) + 65536, f"seed {seed}: {peak} bytes for a file of {len(content)}"
    return num_read


def test_mutated_headers(whole: Path, tmp_path: Path) -> None:
    assert 10 < fuzz(whole, tmp_path / "m.gguf", range(400)) < 390


@pytest.mark.exhaustive
def test_ten_thousand_mutated_headers(whole: Path, tmp_path: Path) -> None:
    assert fuzz(whole, tmp_path / "m.gguf", range(1000, 11_000)) > 100
