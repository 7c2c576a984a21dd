"""Responses that a JSON schema allows, and those that it does not."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.request import urlopen

import pytest

from rljob_trainer.rewards.json_schema import json_schema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('Here:\n```json\n{"name": "Ada"}\n```\n', 1.0),
        ('```json\n{"name": 1}\n```\nbetter:\n```\n{"name": "Ada"}\n```', 1.0),
        ('{"age": 36}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "more": 1}', 0.0),
        ('{"name": "Ada"', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_what_the_schema_allows(response: str, score: float) -> None:
    assert json_schema(response, schema=PERSON).score == score


def test_each_rows_own_schema() -> None:
    for cell in ({"type": "integer"}, '{"type": "integer"}'):
        assert json_schema("7", schema_column="form", form=cell, prompt="x").score == 1.0
        assert json_schema('"7"', schema_column="form", form=cell).score == 0.0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "exactly one of params.schema and params.schemaColumn"),
        ({"schema": {"type": "integer"}, "schema_column": "form"}, "exactly one"),
        ({"schema": {"type": "integr"}}, r"it is not a JSON schema: 'integr' is not valid.*\(at type\)"),
        ({"schema_column": "form"}, "the row has no column 'form'"),
        ({"schema_column": "form", "form": "{"}, "the column 'form' is not JSON"),
    ],
)
def test_what_is_no_schema(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        json_schema("7", **given)


def test_nothing_is_fetched() -> None:
    """A schema that a data set brings along must not make the job ask other machines."""
    asked: list[str] = []

    class NotedRequests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "integer"}')

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), NotedRequests) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/schema"
        with urlopen(address) as there:
            assert there.status == 200
        with pytest.raises(Exception, match="/schema"):
            json_schema("7", schema={"$ref": address})
        server.shutdown()
    assert asked == ["/schema"]
