"""Responses that are to be JSON of a given form (https://json-schema.org), judged by the library jsonschema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rljob_trainer.rewards.rules import RewardVerdict, rule

_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)
_ONE = "it needs exactly one of params.schema and params.schemaColumn"
_NO_SCHEMA: dict[str, Any] = {}


def _prepare() -> None:
    """The library takes a while to load."""
    json_schema("1", schema={"type": "integer"})


def check_schema_params(params: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` saying what is wrong with the job's ``params`` (by the function's names)."""
    if bool(params.get("schema")) == bool(params.get("schema_column")):
        raise ValueError(_ONE)
    if params.get("schema"):
        schema_validator(params["schema"])


@rule("jsonSchema", inline=False, prepare=_prepare)
def json_schema(
    response: str, *, schema: dict[str, Any] = _NO_SCHEMA, schema_column: str = "", **columns: Any
) -> RewardVerdict:
    """1 when the response is JSON that the schema allows, else 0.

    The JSON is the whole response, or its last fenced block. ``schema`` is the same for all rows; ``schema_column``
    is the column with each row's schema, as an object or as text. Exactly one of them is required. References to other
    documents are not followed. Raises ``ValueError`` for an invalid schema.
    """
    validator = schema_validator(_schema_of(schema, schema_column, columns))
    blocks = _FENCE.findall(response)
    try:
        said = json.loads(blocks[-1] if blocks else response, parse_constant=_refused)
        correct = bool(validator.is_valid(said))
    except (ValueError, RecursionError):  # no JSON; nested too deeply
        correct = False
    return RewardVerdict(float(correct), None, correct)


def schema_validator(schema: Any) -> Any:
    """What judges by this schema. Raises ``ValueError`` for what is none."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path))
        raise ValueError(f"it is not a JSON schema: {error.message}{f' (at {where})' if where else ''}") from None
    # An empty registry: the library's own would fetch what the schema refers to.
    return kind(schema, registry=Registry())


def _schema_of(schema: Mapping[str, Any], column: str, columns: Mapping[str, Any]) -> Any:
    if bool(schema) == bool(column):
        raise ValueError(_ONE)
    if not column:
        return schema
    if column not in columns:
        raise ValueError(f"the row has no column {column!r} (set by params.schemaColumn)")
    cell = columns[column]
    if isinstance(cell, str):
        try:
            return json.loads(cell)
        except ValueError as error:
            raise ValueError(f"the column {column!r} is not JSON: {error}") from None
    return cell


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
