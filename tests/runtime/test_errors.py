"""The tree of errors: what a caller catches by which name."""

from __future__ import annotations

import pytest

from runtime.errors import DeviceError, InvalidArgumentError, OutOfMemoryError, UnsupportedError, XservError


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (InvalidArgumentError("top_p is 2, limit 1", param="top_p"), ValueError),
        (OutOfMemoryError("no memory for 7 bytes"), MemoryError),
        (UnsupportedError("mamba is not built"), Exception),
        (DeviceError("cuda is not built"), Exception),
    ],
)
def test_every_error_is_ours_and_python_s(error: XservError, builtin: type[Exception]) -> None:
    with pytest.raises(XservError) as caught:
        raise error
    assert isinstance(caught.value, builtin)
    assert str(caught.value) == error.args[0]


def test_invalid_argument_carries_the_field() -> None:
    assert InvalidArgumentError("bad", param="top_p").param == "top_p"
    assert InvalidArgumentError("bad").param is None
