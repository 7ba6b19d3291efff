"""The adapters that a server serves, by name: those of its start, and those that `/v1/load_lora_adapter` adds.

A name stands for a folder's content at the time of loading. Routes that load are off unless the operator gives a root;
no path from a client leads out of it, links included.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.engine.errors import RequestError
from runtime.engine.messages import AdapterRef
from runtime.engine.process.client import EngineClient
from server.config import ServerConfig

MOST_NAMES = 10_000
MOST_NAME_CHARACTERS = 256


def parse_modules(given: Sequence[str]) -> dict[str, str]:
    """Folders by name of ``name=path``, or of vLLM's JSON ``{"name": ..., "path": ...}``. Raises ``RequestError``."""
    found: dict[str, str] = {}
    for text in given:
        name, path = _module_of(text)
        check_name(name, "lora_modules")
        if name in found:
            raise RequestError(f"lora_modules names {name!r} twice", param="lora_modules")
        found[name] = path
    return found


def _module_of(text: str) -> tuple[str, str]:
    problem = f"lora_modules has {text!r:.200}, must be name=path, or a JSON object with name and path"
    if not text.startswith("{"):
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise RequestError(problem, param="lora_modules")
        return name, path
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(problem, param="lora_modules") from None
    name, path = (fields.get(key) for key in ("name", "path"))
    if fields.keys() - {"name", "path", "base_model_name"} or not (isinstance(name, str) and isinstance(path, str)):
        raise RequestError(problem, param="lora_modules")
    return name, path


def check_name(name: str, param: str) -> None:
    """Raises ``RequestError`` for a name that no request could give."""
    if not name or len(name) > MOST_NAME_CHARACTERS or not name.isprintable():
        raise RequestError(
            f"{param}: an adapter's name must be 1 to {MOST_NAME_CHARACTERS} printable characters, got {name!r:.80}",
            param=param,
        )


class Adapters:
    """Belongs to the event loop's thread, but for `load_all`, which runs before it.

    own_names  of the model, which no adapter may have
    root       the folder that clients' paths must lie in, or None: clients load none
    """

    def __init__(self, client: EngineClient, own_names: Sequence[str], root: str | None = None) -> None:
        self._client, self._own_names = client, own_names
        self.root = None if root is None else Path(root).expanduser().resolve()
        self._by_name: dict[str, AdapterRef] = {}

    @classmethod
    def of(cls, client: EngineClient, own_names: Sequence[str], config: ServerConfig) -> Adapters:
        """With those of the server's start; waits for them. Raises ``RequestError``."""
        made = cls(client, own_names, config.lora_root)
        made.load_all(parse_modules(config.lora_modules))
        return made

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def get(self, name: str | None) -> AdapterRef | None:
        return None if name is None else self._by_name.get(name)

    @property
    def all(self) -> list[AdapterRef]:
        """In the order of their loading."""
        return list(self._by_name.values())

    def load_all(self, modules: dict[str, str]) -> None:
        """Loads those of the server's start; waits for them. Raises ``RequestError``."""
        for name, path in modules.items():
            self._check_free(name)
            folder = str(Path(path).expanduser().resolve())
            self._by_name[name] = AdapterRef.of(name, folder, self._client.load_adapter(name, folder).result())

    async def load(self, name: str, path: str, *, is_new: bool) -> None:
        """Loads the folder at a client's path, under the root; with `is_new` False it may replace one of that name.
        Raises ``RequestError``."""
        assert self.root is not None, "clients load none"
        check_name(name, "lora_name")
        if is_new or name not in self._by_name:
            self._check_free(name)
        folder = self._within(path)
        found = await asyncio.wrap_future(self._client.load_adapter(name, str(folder)))
        if is_new:
            self._check_free(name)  # another request may have been faster
        self._by_name[name] = AdapterRef.of(name, str(folder), found)

    def unload(self, name: str) -> bool:
        """Forgets a name; its open requests go on. False if there is none."""
        return self._by_name.pop(name, None) is not None

    def _within(self, path: str) -> Path:
        """A client's path, relative to the root or absolute."""
        assert self.root is not None
        try:
            folder = (self.root / path).resolve()
        except (OSError, ValueError, RuntimeError):  # a loop of links, a NUL
            folder = self.root.parent
        if not folder.is_relative_to(self.root) or folder == self.root:
            raise RequestError(
                f"lora_path must be a folder or a GGUF file in the server's --lora-root, got {path!r:.200}",
                param="lora_path",
            )
        return folder

    def _check_free(self, name: str) -> None:
        if name in self._own_names:
            raise RequestError(f"{name!r:.80} is the model's own name: choose another", param="lora_name")
        if name in self._by_name:
            raise RequestError(
                f"the adapter {name!r:.80} is loaded already: unload it, or send load_inplace true", param="lora_name"
            )
        if len(self._by_name) >= MOST_NAMES:
            raise RequestError(f"{MOST_NAMES} adapters are loaded, the most: unload some", param="lora_name")
