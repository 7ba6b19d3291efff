"""Configurations of published models: each loads, or is refused for the operation that `archive.json` names.

They are 121 files `config.json` and `hf_quant_config.json`, in an archive that lies beside the checkout and is no part
of it (`../shared/data/configs.tar.gz`).
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from models.configuration.harmless_fields import is_harmless
from models.configuration.json_fields import Fields
from models.errors import ConfigError
from models.quantized.scheme import FIELD, read_quantization
from models.registry import parse_config

ARCHIVE = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "configs.tar.gz"
TABLE: dict[str, str] = json.loads((Path(__file__).parent / "archive.json").read_text())
"""By a file's name: what is not implemented; "" where it loads."""


def read(name: str, values: dict[str, Any]) -> None:
    if not name.endswith("_hf_quant_config.json"):
        parse_config(values, name)
        return
    fields = Fields({FIELD: {**values, "quant_method": "modelopt"}}, name)
    read_quantization(fields)
    fields.refuse_unread(is_harmless)


def refusal(name: str, values: dict[str, Any]) -> str:
    """What a refusal says is missing; "" where there is none."""
    try:
        read(name, values)
    except ConfigError as error:
        said = str(error).partition("Not implemented here: ")[2] or str(error)
        return said.partition(". Supported are ")[0].partition(", though its config names no")[0]
    return ""


@pytest.fixture(scope="module")
def archive() -> dict[str, dict[str, Any]]:
    if not ARCHIVE.is_file():
        pytest.skip(f"{ARCHIVE} is not there")
    with tarfile.open(ARCHIVE) as files:
        opened = {Path(member.name).name: files.extractfile(member) for member in files if member.isfile()}
        return {name: json.loads(file.read()) for name, file in opened.items() if file is not None}


def test_each_configuration_is_as_the_table_says(archive: dict[str, dict[str, Any]]) -> None:
    assert {name: refusal(name, values) for name, values in sorted(archive.items())} == TABLE


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"layer_types": ["linear_attention"], "linear_num_key_heads": 16}, "its family, "),
        ({"mamba_d_state": 128, "layer_types": ["mamba", "attention"]}, "its family, "),
        ({"text_config": {"linear_attn_config": {"kda_layers": [1]}}}, "KDA"),
        ({"mamba_d_state": 16, "mamba_dt_rank": 256}, "Mamba-1"),
        ({"index_topk": 2048}, "indexer"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"architectures": ["SomethingForQuestionAnswering"]}, "a head that classifies"),
        ({"architectures": ["RobertaForMultipleChoice"]}, "a head that classifies; an encoder of its kind"),
        ({"architectures": ["XLMRobertaForCausalLM"]}, "an encoder of its kind"),
        ({"architectures": ["DebertaV2Model"]}, "an encoder of its kind"),
        ({"vision_config": {"depth": 3}}, "picture tower"),
        ({"hidden_size": 64}, 'its family, .*--hf-overrides \'{"architectures": '),
    ],
)
def test_an_unknown_architecture_is_refused_for_what_is_missing(values: dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"is not supported. Not implemented here: .*{missing}.*Supported are "):
        parse_config({"architectures": ["SomethingForCausalLM"], "model_type": "something", **values})
