"""What was made of a text once is found again, within bounds, and is never another text's."""

from __future__ import annotations

from array import array

from rljob_trainer.data.kept import Kept


def test_what_was_kept_is_found_by_its_text() -> None:
    kept: Kept[str] = Kept()
    assert kept.get("a") is None
    assert kept.keep("a", "A") == "A"
    assert kept.keep("", "nothing") == "nothing"
    assert (kept.get("a"), kept.get(""), kept.get("b")) == ("A", "nothing", None)


def test_what_came_first_stays_and_what_does_not_fit_is_not_kept() -> None:
    # 100 letters take 49 + 100 bytes, and 100 ids of four bytes 80 + 400: two of both fit, three do not.
    kept: Kept[array[int]] = Kept(most_bytes=1500)
    values = {letter * 100: array("i", [number] * 100) for number, letter in enumerate("abc")}
    for text, value in values.items():
        assert kept.keep(text, value) is value
    first, second, third = values
    assert (kept.get(first), kept.get(second), kept.get(third)) == (values[first], values[second], None)
    # What is small enough for the rest still is.
    kept.keep("d", array("i", [4]))
    assert kept.get("d") == array("i", [4])


def test_what_is_kept_twice_takes_its_place_once() -> None:
    kept: Kept[str] = Kept(most_bytes=400)
    for _ in range(10):
        kept.keep("a", "A")
    kept.keep("b", "B")
    assert (kept.get("a"), kept.get("b")) == ("A", "B")
