"""YAML is read as kubectl reads it. The expected values are what kubectl 1.32 makes of the same text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.yaml_reading import YamlError, plain_scalar, read_documents, read_value

SCALARS = [
    ("y", True), ("Y", True), ("yes", True), ("Yes", True), ("YES", True), ("on", True), ("On", True), ("true", True),
    ("n", False), ("no", False), ("NO", False), ("off", False), ("Off", False), ("false", False), ("FALSE", False),
    ("yEs", "yEs"), ("tRue", "tRue"), ("nULL", "nULL"),
    ("~", None), ("null", None), ("Null", None), ("NULL", None),
    ("1e-6", 1e-6), ("1.0e-6", 1e-6), ("1E-6", 1e-6), ("1e3", 1000), ("1e+3", 1000), ("+1e3", 1000), ("-1e3", -1000),
    (".5", 0.5), ("-.5", -0.5), ("+.5", 0.5), ("1.", 1), ("1.e3", 1000), ("3.0", 3), ("-3.0", -3), ("3.10", 3.1),
    ("0.1", 0.1), ("0.", 0), ("-0.0", 0), ("-.5e3", -500), ("1.0e10", 10000000000), ("0.0000001", 1e-7),
    ("010", 8), ("0o10", 8), ("0x1f", 31), ("0X1F", 31), ("-0x1f", -31), ("0b11", 3), ("-0b11", -3), ("0B11", 3),
    ("08", 8), ("09.5", 9.5), ("0777", 511), ("00", 0), ("-0", 0), ("+0", 0), ("+1", 1),
    ("1_000", 1000), ("1_000.5", 1000.5), ("1__0", 10), ("0_7", 7), ("0x_f", 15), ("1e1_0", 10000000000), ("_1", "_1"),
    ("9223372036854775807", 9223372036854775807), ("9223372036854775808", 9223372036854775808.0), ("1e22", 1e22),
    ("1e400", "1e400"), ("-1e400", "-1e400"), ("1e-400", 0), ("1.5e300", 1.5e300),
    ("1:30", "1:30"), ("2001-01-01", "2001-01-01"), ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
    ("=", "="), ("1e", "1e"), ("e5", "e5"), ("1.5.2", "1.5.2"), ("0x", "0x"), ("0xg", "0xg"), ("0o8", "0o8"),
    ("0b2", "0b2"), ("+", "+"), (".", "."), ("..", ".."), ("1,000", "1,000"), ("~x", "~x"),
    ("Infinity", "Infinity"), ("inf", "inf"), ("NaN", "NaN"),
    ('"010"', "010"), ("'yes'", "yes"), ('"1e-6"', "1e-6"),
    ("!!str 1", "1"), ("!!str yes", "yes"), ("!!int '3'", 3), ("!!float 3", 3), ("!!bool 'yes'", True), ("! 3", "3"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS, ids=[text for text, _ in SCALARS])
def test_scalar(text: str, value: object) -> None:
    read = read_value(text)
    assert read == value
    assert type(read) is type(value)


def _json_integer(text: str) -> int | float:
    """Go writes whole floats without a point; beyond 64 bits they can only be floats."""
    return int(text) if abs(int(text)) < 2**63 else float(text)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on this machine")
def test_table_is_what_this_machines_kubectl_says() -> None:
    lines = [f"  k{index}: {text}" for index, (text, _) in enumerate(SCALARS)]
    text = "\n".join(["apiVersion: example.com/v1", "kind: Thing", "metadata: {name: a}", "spec:", *lines, ""])
    command = ["kubectl", "label", "--local", "-f", "-", "a=b", "-o", "json"]
    answer = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60).stdout
    spec = json.loads(answer, parse_int=_json_integer)["spec"]
    assert [spec[f"k{index}"] for index in range(len(SCALARS))] == [value for _, value in SCALARS]


@pytest.mark.parametrize("text", [".nan", ".NaN", ".inf", "-.inf", "+.INF"])
def test_numbers_that_json_lacks_are_refused(text: str) -> None:
    with pytest.raises(YamlError, match="not a JSON number"):
        read_documents(f"a: 1\nb: {text}\n")


@pytest.mark.parametrize(
    ("text", "line", "column", "phrase"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, 1, "'a' appears twice, first on line 1"),
        ("a:\n  x: 1\n  'x': 2\n", 3, 3, "'x' appears twice"),
        ("'1': a\n1: b\n", 2, 1, "'1' appears twice"),
        ("a:\n\tb: 1\n", 2, 1, "cannot start any token"),
        ("a: [1, 2\nb: 3\n", 2, 2, "expected ',' or ']'"),
        ("a: *b\n", 1, 4, "undefined alias 'b'"),
        ("a: &a\n  b: *a\n", 1, 4, "contains itself"),
        ("a: &a [*a]\n", 1, 4, "contains itself"),
        ("a: {<<: 3}\n", 1, 5, "<< needs a map"),
        ("b: &b {v: 1}\na: {v: 3, <<: *b}\n", 2, 11, "would override 'v'"),
        ("? [1, 2]\n: a\n", 1, 3, "a key must be text"),
        ("~: a\n", 1, 1, "a key must not be null"),
        ("a: !!int x\n", 1, 4, "not of the type !!int"),
        ("a: !!bool 1\n", 1, 4, "not of the type !!bool"),
        ("a: @x\n", 1, 4, "cannot start any token"),
        ("a: 'open\nb: 2\n", 3, 1, "unexpected end of stream"),
        ("a: 1\nb: \x01\n", 2, 4, "control characters"),
        ("a: b: c\n", 1, 5, "mapping values are not allowed here"),
    ],
)
def test_errors_say_where(text: str, line: int, column: int, phrase: str) -> None:
    with pytest.raises(YamlError) as caught:
        read_documents(text)
    assert phrase in caught.value.problem
    assert (caught.value.line, caught.value.column) == (line, column)


def test_several_documents_and_empty_ones() -> None:
    documents = read_documents("---\na: 1\n---\n---\n# nothing\n---\nb: 2\n...\n")
    assert [document.data for document in documents] == [{"a": 1}, {"b": 2}]
    assert documents[1].line_of(("b",)) == 7


def test_anchors_merges_and_other_keys() -> None:
    (document,) = read_documents("base: &base {v: 1, w: 2}\nuse: {<<: *base, v: 3}\ntwo: {<<: [*base, {w: 9, z: 1}]}\n")
    assert document.data["use"] == {"v": 3, "w": 2}
    assert document.data["two"] == {"v": 1, "w": 2, "z": 1}
    assert read_value("{1: a, yes: b, 1.5: c, 0x10: d}") == {"1": "a", "true": "b", "1.5": "c", "16": "d"}


def test_byte_order_mark_and_carriage_returns() -> None:
    assert read_documents("\ufeffa: 1\r\nb: yes\r\n")[0].data == {"a": 1, "b": True}


def test_positions_lead_to_the_closest_part_that_exists() -> None:
    (document,) = read_documents("spec:\n  reward:\n    functions:\n      - type: x\n      - type: y\n")
    assert document.line_of(("spec", "reward", "functions", 1, "type")) == 5
    assert document.line_of(("spec", "reward", "functions", 1, "weight")) == 5
    assert document.line_of(("spec", "model")) == 1


def test_a_bomb_of_aliases_is_refused_quickly() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    with pytest.raises(YamlError, match="expand to more than"):
        read_documents("\n".join(lines))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(YamlError, match="levels deep"):
        read_documents("[" * 5000 + "]" * 5000)


def test_too_long_a_file_is_refused() -> None:
    with pytest.raises(YamlError, match="characters"):
        read_documents("# " + "x" * (4 << 20))


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_that_python_writes_is_read_back(value: float) -> None:
    read = plain_scalar(repr(value))
    assert read == value
    assert isinstance(read, int) == (value.is_integer() and abs(value) < 2**63)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_gives_data_or_a_yaml_error(text: str) -> None:
    try:
        documents = read_documents(text)
    except YamlError as error:
        documents, place = [], (error.line, error.column)
        assert min(place) >= 1
    for document in documents:
        json.dumps(document.data, allow_nan=False)


@pytest.mark.parametrize(
    "digits", ["9" * 309, "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 300, "0b" + "1" * 1030, "0o" + "7" * 400]
)
def test_whole_numbers_beyond_every_float_are_text(digits: str) -> None:
    """As go-yaml has it: what neither an integer nor a float takes is a string."""
    assert read_value(digits) == digits


def test_the_largest_float_is_one_when_written_as_a_whole_number() -> None:
    assert read_value(str(int(sys.float_info.max))) == sys.float_info.max


def test_no_text_holds_nul() -> None:
    with pytest.raises(YamlError, match="line 2, column 4: text must not contain the character NUL"):
        read_value('a: 1\nb: "x\\0y"')
