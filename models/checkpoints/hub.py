"""Resolves a model's name to local files: the bundled model, a folder, a GGUF file, or a Hugging Face repository.

Only the files that the engine reads are downloaded: JSON, safetensors, chat templates and merges of the
repository's top folder; of "owner/name:Q4_K_M" the GGUF file of that name, or its shards, and the float16 file of the
tower if the model reads pictures. Code, pickles and other formats are not downloaded.
"""

from __future__ import annotations

import io
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from models.errors import GatedModelError, HubError, HubOfflineError, ModelNotFoundError
from models.gguf.mmproj import reads_pictures, towers_of
from runtime.later import later
from runtime.progress import ON_STDERR, Reporter, Show
from tokenizer.warn import warn_once

_hub = later("huggingface_hub")
_errors, _utils = later("huggingface_hub.errors"), later("huggingface_hub.utils")
BUNDLED_MODEL = Path(__file__).parents[1] / "demo"
BUNDLED_MODEL_NAME = "xserv-demo"

_TOKENIZERS = ["merges.txt", "tokenizer.model", "tiktoken.model", "*.tiktoken", "sentencepiece.bpe.model"]
_WANTED_FILES = ["*.json", "model*.safetensors", "*.jinja", *_TOKENIZERS, "LICENSE*", "README.md"]
_UNWANTED_FILES = ["*/*.json", "*/*.safetensors", "LICENSE*/*", *(f"*/{name}" for name in _TOKENIZERS)]
"""Other copies of the weights lie in subfolders; chat templates by name, which are wanted, too."""
_GGUF = b"GGUF"  # whatever the file is called: Ollama's are blobs named by a checksum
_REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_TOWERS, _WANTED_TOWERS = ["mmproj*.gguf"], ["mmproj*[!Bb][Ff]16.gguf"]
_SHARD = re.compile(r"-(\d+)-of-\d+\.gguf")


def resolve_model(name_or_path: str | Path | None, reporter: Reporter = ON_STDERR) -> Path:
    """The folder or GGUF file of a model: None is the bundled one, an existing path is itself, anything else a hub id.

    A hub id ("Qwen/Qwen3-0.6B") is downloaded into huggingface_hub's cache, which the reporter shows, or found
    there. One with a colon ("Qwen/Qwen3-0.6B-GGUF:Q8_0") is that repository's GGUF file of this name.

    Raises `ModelNotFoundError`, `GatedModelError`, `HubOfflineError` or `HubError`, each naming what was
    asked for.
    """
    path = local_model(name_or_path)
    if path is not None:
        return path
    name = str(name_or_path)
    repository, colon, tag = name.partition(":")
    if not colon:
        return _download(name, reporter, _WANTED_FILES, _UNWANTED_FILES)
    patterns = _gguf_patterns(tag)
    path = _only_gguf(name, _download(repository, reporter, patterns, _TOWERS), patterns)
    if reads_pictures(path):
        try:
            _download(repository, reporter, _WANTED_TOWERS)
            if not towers_of(path, ""):  # some have a bfloat16 one alone
                _download(repository, reporter, _TOWERS)
        except HubOfflineError as error:
            warn_once(f"{name}: the model reads text alone, since its tower is not here: {error}")
    return path


def local_model(name_or_path: str | Path | None) -> Path | None:
    """`resolve_model` of what lies on this machine; None for a hub id. Raises `ModelNotFoundError` for anything else.
    Nothing is downloaded."""
    if name_or_path is None:
        return BUNDLED_MODEL
    name, path = str(name_or_path), _local_path(name_or_path)
    if name and path.is_dir():
        return path
    if path.is_file():
        try:
            with path.open("rb") as file:
                begin = file.read(len(_GGUF))
        except OSError as error:
            raise ModelNotFoundError(f"{name}: cannot be read ({error.strerror})") from None
        if begin != _GGUF and path.suffix != ".gguf":  # else the reader says what is wrong with it
            raise ModelNotFoundError(
                f"{name}: is a file that begins with {begin!r}; a model is a GGUF file, which begins with {_GGUF!r}, or"
                " the folder that holds config.json"
            )
        return path
    repository, colon, tag = name.partition(":")
    is_id = _REPOSITORY_ID.fullmatch(repository) and ".." not in repository and "--" not in repository
    if isinstance(name_or_path, Path) or not is_id or (colon and not _TAG.fullmatch(tag)):
        raise ModelNotFoundError(f"{name!r}: there is no such file or folder, and it is no hub id (owner/name)")
    return None


def model_name(name_or_path: str | Path | None) -> str:
    """The model's display name: the hub id as given, a folder's name, a GGUF file's without its ending, or
    "xserv-demo" for the bundled one. Nothing is downloaded."""
    if name_or_path is None:
        return BUNDLED_MODEL_NAME
    path = _local_path(name_or_path)
    if not path.exists():
        return str(name_or_path)
    if path.is_file():
        return path.stem
    folder = path.resolve()
    return BUNDLED_MODEL_NAME if folder == BUNDLED_MODEL.resolve() else folder.name


def _local_path(name_or_path: str | Path) -> Path:
    name = str(name_or_path)
    return Path.home() / name[2:] if name.startswith("~/") else Path(name)


def _gguf_patterns(tag: str) -> list[str]:
    """Patterns of the repository's files of this name, in any case, in one piece or in shards."""
    either_case = "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in tag)
    ends = [f"{either_case}.gguf", f"{either_case}-[0-9]*-of-[0-9]*.gguf"]
    return [start + end for start in ("", "*[-._/]") for end in ends]


def _only_gguf(name: str, folder: Path, patterns: list[str]) -> Path:
    """The file, or first shard, in the folder that matches."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.gguf"))]
    names = [each for each in names if not each.startswith("mmproj")]
    found = [each for each in names if any(fnmatchcase(each, pattern) for pattern in patterns)]
    firsts = [each for each in found if not (shard := _SHARD.search(each)) or int(shard[1]) == 1]
    if len(firsts) == 1:
        return folder / firsts[0]
    if firsts:
        raise ModelNotFoundError(f"{name}: is one of {', '.join(firsts)}: name more of the file")
    raise ModelNotFoundError(f"{name}: the repository has no GGUF file whose name ends so; its page lists the files")


def _download(repository: str, reporter: Reporter, wanted: list[str], unwanted: list[str] | None = None) -> Path:
    try:
        with reporter.shown(f"downloading {repository}", is_bytes=True) as show:
            bar = _bar_class(show)
            folder = _hub.snapshot_download(repository, allow_patterns=wanted, ignore_patterns=unwanted, tqdm_class=bar)
    except _errors.GatedRepoError:
        raise GatedModelError(
            f"{repository}: the repository is gated; accept its licence there and log in (`hf auth login`)"
        ) from None
    except _errors.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{repository}: neither a local folder nor a repository of the hub that you may read (a private"
            " one needs `hf auth login`)"
        ) from None
    except _errors.IncompleteSnapshotError as error:
        raise HubOfflineError(
            f"{repository}: the hub cannot be reached, and only a part of the model is in the local cache"
        ) from error
    except (_errors.LocalEntryNotFoundError, _errors.HfHubHTTPError) as error:
        answer = error if isinstance(error, _errors.HfHubHTTPError) else error.__cause__
        if isinstance(answer, _errors.HfHubHTTPError):
            raise HubError(f"{repository}: the hub answered {answer.response.status_code}") from error
        raise HubOfflineError(
            f"{repository}: no such local folder, and the hub cannot be reached; give a folder, or no"
            " model at all for the bundled one"
        ) from error
    except Exception as error:  # anything else a download may meet: connections, disks, checksums
        raise HubError(f"{repository}: the download failed ({type(error).__name__}: {error})") from error
    return Path(folder)


def _bar_class(show: Show) -> type[Any]:
    """The class of huggingface_hub's progress bars: they draw nothing; those that count bytes call `show`."""

    class Bar(_utils.tqdm):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.counts_bytes = named.get("unit") == "B"
            is_disabled = bool(named.pop("disable", False))  # None would mean: unless it is a terminal
            named |= {"disable": is_disabled, "file": io.StringIO()}
            super().__init__(*arguments, **named)

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self.counts_bytes and self.total:
                show(int(self.n), int(self.total))

    return Bar
