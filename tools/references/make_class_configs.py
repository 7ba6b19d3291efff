"""Writes the defaults of transformers' configuration classes, for `tests/models/configuration/test_classes.py`.

    python tools/references/make_class_configs.py tests/models/configuration/class_configs.json

A script for a Python with transformers. The file has `Config().to_dict()` by `model_type`, for each type in
`models/configuration/class_defaults.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.configuration.class_defaults import model_types


def main() -> None:
    found = {name: CONFIG_MAPPING[name]().to_dict() for name in model_types()}
    Path(sys.argv[1]).write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in found) + "\n}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
