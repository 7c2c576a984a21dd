"""docs/walks.md says where a prompt group and a field of the job go; a real run and the sources say the same."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from benchmarks.silent_faults.here import Watched, attempt, job

ROOT = Path(__file__).parents[3]
TRAINER = ROOT / "trainer" / "rljob_trainer"
PAGE = (ROOT / "docs" / "walks.md").read_text()
GROUP, FIELD = PAGE.split("\n## ")[1:]
MOST_FILES, MOST_FORMS, MOST_FILES_OF_A_FIELD = 20, 8, 5

Call = tuple[str, str]


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


WALK: list[Call] = [(file, function) for file, function, _ in rows(GROUP)]


@contextmanager
def calls_of(wanted: set[Call]) -> Iterator[list[Call]]:
    """Inside, every call of these functions in any thread is noted, in order.

    Methods are watched where they are looked up: a profile function does not see each call in a thread that lives for a
    moment, such as one that reads prompts. Functions are imported by their names, and need one.
    """
    seen: list[Call] = []
    functions = {call for call in wanted if "." not in call[1]}
    known: dict[Any, Call | None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in known:
            path = Path(code.co_filename)
            call = (path.relative_to(TRAINER).as_posix(), code.co_qualname) if path.is_relative_to(TRAINER) else None
            known[code] = call if call in functions else None
        if (call := known[code]) is not None:
            seen.append(call)

    def noted(call: Call, method: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            seen.append(call)
            return method(*args, **kwargs)

        return called

    before, before_in_threads = sys.getprofile(), threading.getprofile()
    with ExitStack() as stack:
        for file, method in wanted - functions:
            owner, _, name = method.partition(".")
            kind = getattr(import_module(f"rljob_trainer.{file.removesuffix('.py').replace('/', '.')}"), owner)
            stack.enter_context(patch.object(kind, name, noted((file, method), kind.__dict__[name])))
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            yield seen
        finally:
            sys.setprofile(before)
            threading.setprofile(before_in_threads)


def test_a_group_takes_the_way_that_the_page_says(tmp_path: Path) -> None:
    with calls_of(set(WALK)) as seen:
        watched = Watched()
        attempt(job(stop={"steps": 1}), tmp_path, watched)
    assert watched.ended.startswith("succeeded"), watched.ended
    left = iter(seen)
    for place, call in enumerate(WALK):
        assert call in left, f"row {place + 1}: {call} does not come after {WALK[max(0, place - 1)]}"


def test_the_way_is_short_and_the_data_takes_few_forms() -> None:
    forms = [form for *_, form in rows(GROUP) if form]
    assert len({file for file, _ in WALK}) <= MOST_FILES
    assert len(forms) == len(set(forms)) <= MOST_FORMS
    sources = "\n".join(path.read_text() for path in TRAINER.rglob("*.py"))
    assert [form for form in forms if not re.search(rf"^class {form}\b", sources, re.MULTILINE)] == []


def test_a_live_field_is_named_in_the_files_that_the_page_lists_and_in_no_other() -> None:
    names_it = re.compile(r"(staleness|schedule|pipeline|self|\bs)\.fraction\b|^ +fraction[:=]", re.MULTILINE)
    sources = [path for package in ("api", "operator", "trainer") for path in (ROOT / package).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in sources if names_it.search(path.read_text())}
    assert found == {file for file, _ in rows(FIELD)}
    assert len(found) <= MOST_FILES_OF_A_FIELD
    for named in re.findall(r"`((?:operator|control)/[a-z_/]+\.py)`", FIELD):
        assert (ROOT / named).exists() or (TRAINER / named).exists(), named
