"""Schemas as the libraries write them that clients use: every type of pydantic's, and what zod and others make."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pydantic
import pytest

from runtime.engine.grammar.compiler import check_grammar
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.grammar.json_schema import prepared
from runtime.engine.grammar.matcher import Vocabulary


class Letters(Enum):
    A = "a"
    B = "b"


class Numbers(IntEnum):
    ONE = 1


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    others: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]] = []
    parent: Dog | None = None


PET = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]

TYPES: list[Any] = [
    Path, pydantic.FilePath, pydantic.SecretStr, pydantic.SecretBytes, UUID, pydantic.UUID4, datetime, date, time,
    timedelta, pydantic.AwareDatetime, Decimal, bytes, pydantic.Base64Bytes, pydantic.Base64UrlStr, IPv4Address,
    IPv6Address, IPv4Network, pydantic.IPvAnyAddress, pydantic.AnyUrl, pydantic.HttpUrl, pydantic.PostgresDsn,
    pydantic.Json[list[int]], pydantic.JsonValue, pydantic.ByteSize, pydantic.PositiveInt, pydantic.StrictBool,
    Letters, Numbers, Literal["a", 1, None], dict[int, str], dict[Letters, int], dict[UUID, int], tuple[int, str],
    Annotated[str, pydantic.Field(min_length=1, max_length=65535, pattern="^[a-z]+$")], tuple[int, ...], tuple[()],
    dict[Literal["a"], Any], Any, object,
    Annotated[float, pydantic.Field(gt=0, le=1.7e308)], PET, PET | None, list[PET],
]  # fmt: skip

ZOD: dict[str, Any] = {
    "email": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    "hostname": {"type": "string", "format": "hostname", "pattern": r"^(?=.{1,253}\.?$)[a-z](?:[a-z0-9-]{0,61})$"},
    "int": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    "float64": {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "enum_record": {
        "type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": {},
        "required": ["a", "b"],
    },
    "uuid_record": {"type": "object", "propertyNames": {"format": "uuid", "pattern": "^[0-9a-f-]{36}$"}},
    "undefined": {"type": "object", "properties": {"v": {"not": {}}, "w": {"$ref": "#/properties/v"}}},
    "draft4": {"id": "x", "type": "integer", "minimum": 0, "exclusiveMinimum": True, "nullable": True},
    "bson": {"type": "string", "pattern": r"^[^[\]&&{}]+\/{1}$", "uniqueItems": False, "x-order": 1, "$comment": "c"},
    "openapi": {
        "discriminator": {"propertyName": "kind"}, "oneOf": [{"$ref": "#/c/Cat"}, {"$ref": "#/c/Dog%5Bint%5D"}],
        "c": {
            "Cat": Cat.model_json_schema(),
            "Dog[int]": {"type": "object", "properties": {"kind": {"enum": ["dog"]}}, "required": ["kind"]},
        },
    },
}  # fmt: skip


def schemas() -> Iterator[Any]:
    for kind in TYPES:
        model = pydantic.create_model("M", v=(kind, ...), w=(list[kind], None))
        yield pytest.param(model.model_json_schema(), id=str(kind))
    for name, schema in ZOD.items():
        yield pytest.param(schema, id=name)


@pytest.mark.parametrize("schema", [*schemas()])
def test_a_librarys_schema_is_taken(schema: Any, vocabulary: Vocabulary) -> None:
    for closes in (False, True):
        text = json.dumps(prepared({"$schema": "https://example.com/any", **schema}, closes=closes).schema)
        check_grammar(Grammar(kind="json_schema", text=text), vocabulary)
