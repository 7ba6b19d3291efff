"""The errors of the models room.

`ModelLoadError` covers everything that can be wrong with a model: its name, its folder, its config and its
weights. Each message names the file, the field or tensor, the value found and what was expected.

    XservError
    └── ModelLoadError
        ├── ConfigError           config.json and the like, GGUF's metadata: missing, a bad or unsupported field
        ├── WeightsError          safetensors or GGUF: malformed, or its tensors do not fit the config
        └── HubError              a hub id that could not be downloaded
            ├── ModelNotFoundError    no such folder, repository or revision
            ├── GatedModelError       the repository asks for a licence or a token
            └── HubOfflineError       no network, and not in the cache
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.errors import XservError

_MOST_PROBLEMS_SHOWN = 50


class ModelLoadError(XservError):
    """A model could not be loaded."""


class ConfigError(ModelLoadError):
    """`config.json`, `generation_config.json` or GGUF's metadata is missing, unreadable, or asks for something not
    supported."""


class WeightsError(ModelLoadError):
    """A safetensors or GGUF file is malformed, or its tensors do not fit the config.

    `problems` lists every offender; the text shows the first fifty.
    """

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        lines = [message, *(f"  {problem}" for problem in self.problems[:_MOST_PROBLEMS_SHOWN])]
        if len(self.problems) > _MOST_PROBLEMS_SHOWN:
            lines.append(f"  ... and {len(self.problems) - _MOST_PROBLEMS_SHOWN} more")
        super().__init__("\n".join(lines))


class HubError(ModelLoadError):
    """A hub id could not be turned into a local folder."""


class ModelNotFoundError(HubError):
    """There is no such folder, and no such repository on the hub."""


class GatedModelError(HubError):
    """The repository is gated: its licence has to be accepted, or a token is needed."""


class HubOfflineError(HubError):
    """The hub cannot be reached and the model is not in the local cache."""


def one_line(message: str) -> str:
    """The message with unprintable characters escaped: it holds names from untrusted files."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in message)
