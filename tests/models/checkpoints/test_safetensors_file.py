"""The safetensors reader: views without a copy, and every malformed file refused with its numbers."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from models.checkpoints.safetensors_file import SafetensorsFile
from models.errors import WeightsError
from tests.models.folders import write_safetensors


def write_raw(path: Path, header: bytes | dict[str, Any], body: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + body)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def owner_of(array: np.ndarray[Any, Any]) -> Any:
    """Whose memory an array looks at."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


def test_reads_what_the_reference_library_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": rng.standard_normal((2, 2, 2)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"format": "np"})
    file = SafetensorsFile(path)
    assert set(file.tensors) == set(tensors)
    for name, expected in tensors.items():
        array = file.array(name)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_a_tensor_is_a_read_only_view_of_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    array = SafetensorsFile(path).array("a")  # the mapping outlives the reader
    assert isinstance(owner_of(array), mmap.mmap)
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])


def test_unaligned_data_is_read_right(tmp_path: Path) -> None:
    header = json.dumps({"a": entry(offsets=[0, 8])}).encode()
    header += b" " * (-len(header) % 4 + 1)  # so that the data starts at an odd byte
    path = write_raw(tmp_path / "m.safetensors", header, np.array([1.5, -2.0], np.float32).tobytes())
    array = SafetensorsFile(path).array("a")
    assert array.flags.aligned
    np.testing.assert_array_equal(array, np.array([1.5, -2.0], np.float32))


def test_released_pages_can_be_read_again(tmp_path: Path) -> None:
    values = np.arange(100_000, dtype=np.float32)
    write_safetensors(tmp_path / "m.safetensors", {"a": values[:3], "b": values})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    array = file.array("b")
    file.release("b")
    file.release("a")
    np.testing.assert_array_equal(array, values)


MALFORMED: list[tuple[Any, bytes, str]] = [
    ({"a": entry()}, b"", "tensor 'a': its data ends at byte 8 of 0; the file is truncated"),
    ({"a": entry()}, b"1234567", "tensor 'a': its data ends at byte 8 of 7; the file is truncated"),
    ({"a": entry()}, b"12345678" * 2, "8 bytes after the last tensor belong to no tensor"),
    ({"a": entry(offsets=[8, 16])}, b"12345678" * 2, "8 bytes before tensor 'a' belong to no tensor"),
    (
        {"a": entry(), "b": entry(offsets=[4, 12])},
        b"12345678" * 2,
        "tensors 'a' and 'b' overlap at byte 4",
    ),
    ({"a": entry(), "b": entry()}, b"12345678", "tensors 'a' and 'b' overlap at byte 0"),
    ({"a": entry(offsets=[8, 0])}, b"12345678", r"data_offsets must be \[begin, end\]"),
    ({"a": entry(offsets=[-8, 0])}, b"12345678", r"data_offsets must be \[begin, end\]"),
    ({"a": entry(offsets=[0, 2**70])}, b"12345678", r"data_offsets must be \[begin, end\]"),
    ({"a": entry(offsets=[0, 4, 8])}, b"12345678", r"data_offsets must be \[begin, end\]"),
    ({"a": entry(offsets=[0, 8.0])}, b"12345678", r"data_offsets must be \[begin, end\]"),
    ({"a": entry(offsets=[False, 8])}, b"12345678", r"data_offsets must be \[begin, end\]"),
    ({"a": entry(shape=[3])}, b"12345678", r"tensor 'a': F32 \[3\] does not take the 8 bytes it is given"),
    ({"a": entry(shape=[2**40, 2**40])}, b"12345678", "does not take the 8 bytes"),
    ({"a": entry(shape=[-2, -1])}, b"12345678", "shape must be"),
    ({"a": entry(shape=[1] * 33)}, b"12345678", "shape must be at most 32 sizes"),
    ({"a": entry(shape=2)}, b"12345678", "shape must be"),
    ({"a": entry(dtype="F31")}, b"12345678", "tensor 'a': unknown dtype 'F31'"),
    ({"a": entry(dtype=["F32"])}, b"12345678", "unknown dtype"),
    ({"a": entry(more=1)}, b"12345678", "its entry must have dtype, shape and data_offsets"),
    ({"a": [1, 2]}, b"12345678", "its entry must have dtype, shape and data_offsets"),
    ({"a": None}, b"", "its entry must have dtype, shape and data_offsets"),
    (b"[]", b"", "the header must be a JSON object, not list"),
    (b"{", b"", "the header is not JSON"),
    (b"\xff\xfe", b"", "the header is not JSON"),
    (b"[" * 100_000, b"", "the header is not JSON"),
    (b"", b"", "the header is not JSON"),
    (
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}',
        b"",
        "the header names 'a' twice",
    ),
]


@pytest.mark.parametrize(("header", "body", "message"), MALFORMED)
def test_a_malformed_file_is_refused(tmp_path: Path, header: Any, body: bytes, message: str) -> None:
    path = write_raw(tmp_path / "m.safetensors", header, body)
    with pytest.raises(WeightsError, match="m.safetensors: .*" + message):
        SafetensorsFile(path)


def test_a_header_of_too_many_tensors_is_refused_unparsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models' files and adapters' are read by the same class; parsing took seconds."""
    entries = b",".join(b'"%d":{"dtype":"F32","shape":[0,0],"data_offsets":[0,0]}' % at for at in range(200_001))
    path = write_raw(tmp_path / "m.safetensors", b"{" + entries + b"}")
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the header was parsed"))
    with pytest.raises(WeightsError, match="the header has 1000004 commas, more than the limit of 1000000"):
        SafetensorsFile(path)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for content, message in (
        (b"", "truncated: 0 bytes, less than the 8"),
        (b"1234567", "truncated: 7 bytes, less than the 8"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: the header ends at byte 108, the file at 10"),
        (
            (2**63).to_bytes(8, "little") + b"{}",
            "a header of 9223372036854775808 bytes is more than the limit",
        ),
    ):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=message):
            SafetensorsFile(path)
    with pytest.raises(WeightsError, match="nowhere: the file is missing"):
        SafetensorsFile(tmp_path / "nowhere")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_spoilt_file_never_escapes_as_another_error(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.mktemp("spoilt") / "m.safetensors"
    write_safetensors(path, {"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16)})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        file = SafetensorsFile(path)
    except WeightsError:
        return
    for name, one in file.tensors.items():
        if one.dtype in ("F32", "F16", "BF16"):
            assert file.array(name).shape == one.shape
