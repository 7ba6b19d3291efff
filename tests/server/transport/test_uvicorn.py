"""uvicorn's private parts that the protocol replaces or reads: an upgrade that changes them fails here."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl

from server.config import ServerConfig, ServerConfigError
from server.transport import protocol

ROOT = Path(__file__).parents[3]


def test_the_installed_version_is_known_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol.check_uvicorn(uvicorn.__version__)
    for version in ("0.33.9", "0.55.0", "1.0", "unknown"):
        with pytest.raises(ServerConfigError, match=f"uvicorn {version} is not known: .*limits of headers"):
            protocol.check_uvicorn(version)
    monkeypatch.setattr(uvicorn, "__version__", "0.99.0")
    with pytest.raises(ServerConfigError, match=r"uvicorn 0\.99\.0 is not known"):
        protocol.uvicorn_config(lambda scope, receive, send: None, ServerConfig())  # type: ignore[arg-type,return-value]


def test_the_package_asks_for_the_known_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (asked,) = (each for each in project["dependencies"] if each.startswith("uvicorn"))
    bounds = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)\.(\d+)", asked)]
    assert tuple(bounds) == protocol.UVICORN_VERSIONS


def test_what_is_replaced_or_read_is_there() -> None:
    """Each method that ours calls by `super()` is uvicorn's, and each field that it reads is set there or by ours."""
    theirs = httptools_impl.HttpToolsProtocol
    (ours,) = (
        node
        for node in ast.parse(inspect.getsource(protocol)).body
        if isinstance(node, ast.ClassDef) and node.name == "LimitedHttpProtocol"
    )
    text = ast.unparse(ours)
    replaced = set(re.findall(r"super\(\)\.(\w+)", text)) | {"send_400_response", "_unsupported_upgrade_warning"}
    for name in replaced:
        assert callable(getattr(theirs, name, None)), name
    source = inspect.getsource(httptools_impl)
    own = {node.name for node in ours.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {
        node.target.id for node in ours.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    own |= set(re.findall(r"self\.(_\w+)(?:: [^=]+)? = ", text)) | {"_whole_app"}
    for name in set(re.findall(r"self\.(\w+)", text)) - own:
        assert re.search(rf"self\.{name}\b", source) or hasattr(theirs, name), name
    for name in set(re.findall(r"self\.(?:cycle|flow)\.(\w+)", text)):
        assert re.search(rf"\b{name}\b", source), name
