"""From what a user calls a model to a local folder: the bundled model, a folder, or a repository of the
Hugging Face hub.

Only the files that the engine reads are downloaded: JSON, safetensors, chat templates and merges of the
repository's top folder. Code, pickles and other formats stay where they are.
"""

from __future__ import annotations

import re
from pathlib import Path

from models.errors import GatedModelError, HubError, HubOfflineError, ModelNotFoundError

BUNDLED_MODEL = Path(__file__).parent / "demo"

_WANTED_FILES = ["*.json", "model*.safetensors", "*.jinja", "merges.txt", "LICENSE*", "README.md"]
_UNWANTED_FILES = ["*/*"]  # other copies of the weights lie in subfolders
_REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def resolve_model(name_or_path: str | Path | None) -> Path:
    """The folder of a model: None is the bundled one, an existing folder is itself, anything else a hub id.

    A hub id ("Qwen/Qwen3-0.6B") is downloaded into huggingface_hub's cache, with its progress bar, or found
    there.

    Raises `ModelNotFoundError`, `GatedModelError`, `HubOfflineError` or `HubError`, each naming what was
    asked for.
    """
    if name_or_path is None:
        return BUNDLED_MODEL
    name = str(name_or_path)
    path = Path.home() / name[2:] if name.startswith("~/") else Path(name)
    if name and path.is_dir():
        return path
    if path.is_file():
        raise ModelNotFoundError(f"{name}: is a file; a model is the folder that holds config.json")
    if isinstance(name_or_path, Path) or not _REPOSITORY_ID.fullmatch(name) or ".." in name or "--" in name:
        raise ModelNotFoundError(f"{name!r}: there is no such folder, and it is no hub id (owner/name)")
    return _download(name)


def _download(repository: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(repository, allow_patterns=_WANTED_FILES, ignore_patterns=_UNWANTED_FILES)
    except errors.GatedRepoError:
        raise GatedModelError(
            f"{repository}: the repository is gated; accept its licence there and log in (`hf auth login`)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{repository}: neither a local folder nor a repository of the hub that you may read (a private"
            " one needs `hf auth login`)"
        ) from None
    except errors.IncompleteSnapshotError as error:
        raise HubOfflineError(
            f"{repository}: the hub cannot be reached, and only a part of the model is in the local cache"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        answer = error if isinstance(error, errors.HfHubHTTPError) else error.__cause__
        if isinstance(answer, errors.HfHubHTTPError):
            raise HubError(f"{repository}: the hub answered {answer.response.status_code}") from error
        raise HubOfflineError(
            f"{repository}: no such local folder, and the hub cannot be reached; give a folder, or no"
            " model at all for the bundled one"
        ) from error
    except Exception as error:  # whatever else a download may meet: connections, disks, checksums
        raise HubError(f"{repository}: the download failed ({type(error).__name__}: {error})") from error
    return Path(folder)
