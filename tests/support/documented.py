"""The commands that README, docs and the other pages show, and the table that says where each of them is typed.

Commands are the lines of ``sh`` blocks, those of comments at the head of an example (``#   rljob ...``), and code in a
sentence that a reader could type: a program with what it is to work on, and nothing left out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".yaml")
GENERATED = ("docs/operator/conditions.md", "docs/metrics.md", "/results/")
"""Written by programs from their own texts and measurements."""

_BLOCK = re.compile(r"^```(?:sh|bash|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_IN_A_SENTENCE = re.compile(r"`([^`]+)`")
_IN_AN_EXAMPLE = re.compile(r"^# {3,}(rljob .+)$", re.MULTILINE)
_BEGINS_A_COMMAND = re.compile(
    r"(?:[A-Z0-9_]+=\S+ )*(?:(?:\.venv/bin/)?(?:rljob|python|python3|python3\.11) |(?:make|kubectl|helm|docker|kind) )"
)
_COMMENT = re.compile(r"(?:^|\s+)#(?!\d).*$")


@dataclass(frozen=True)
class Command:
    """One command as it is shown: where it begins, and its text without a comment and in one line."""

    page: str
    line: int
    text: str
    comment: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        """As the shell takes them apart."""
        return shlex.split(self.text)


def pages() -> list[Path]:
    """Those that show commands, README first."""
    folders = ["docs", "examples", "benchmarks", "charts", "tests"]
    found = [page for folder in folders for page in sorted((ROOT / folder).rglob("*.md"))]
    found += sorted((ROOT / "examples").rglob("*.yaml"))
    shown = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]
    return [page for page in shown if not any(part in str(page.relative_to(ROOT)) for part in GENERATED)]


def commands() -> list[Command]:
    """All of them, page by page, in the order of the page."""
    return [
        command
        for page in pages()
        for command in commands_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    ]


def commands_of(text: str, page: str) -> list[Command]:
    """Those of one page; ``page`` is its name in the places."""
    found = (
        _in_an_example(text, page) if page.endswith(".yaml") else [*_in_blocks(text, page), *_in_sentences(text, page)]
    )
    return sorted(found, key=lambda command: command.line)


def _in_blocks(text: str, page: str) -> Iterator[Command]:
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1)) + 1
        for whole in re.finditer(r"(?:.*\\\n)*.*\n", block[1]):
            joined = whole[0].replace("\\\n", " ").strip()
            comment = _COMMENT.search(joined)
            shown = " ".join(_COMMENT.sub("", joined).split())
            if shown:
                place = line + block[1].count("\n", 0, whole.start())
                yield Command(page, place, shown, comment[0].strip().removeprefix("#").strip() if comment else "")


def _in_sentences(text: str, page: str) -> Iterator[Command]:
    prose = _FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)
    for code in _IN_A_SENTENCE.finditer(prose):
        shown = " ".join(code[1].split())
        if _BEGINS_A_COMMAND.match(shown) and _is_complete(shown):
            yield Command(page, prose.count("\n", 0, code.start()) + 1, shown)


def _in_an_example(text: str, page: str) -> Iterator[Command]:
    for shown in _IN_AN_EXAMPLE.finditer(text):
        yield Command(page, text.count("\n", 0, shown.start()) + 1, shown[1].strip())


def _is_complete(shown: str) -> bool:
    """Whether it is to be typed, and not a verb or an option that is spoken of."""
    words = shlex.split(shown)
    if "..." in words:
        return False
    while "=" in words[0]:
        words = words[1:]
    program, *arguments = words
    if Path(program).name == "rljob":
        return any(not argument.startswith("-") for argument in arguments[1:])
    if program == "kubectl":
        return len(arguments) > 1
    return bool(arguments) and not arguments[0].startswith("--")


@dataclass(frozen=True)
class Listed:
    """Commands that no chain types, why, and what stands for them."""

    reason: str
    where: tuple[str, ...]
    texts: frozenset[str]


@dataclass(frozen=True)
class Chain:
    """Pages whose commands are typed one after the other in one copy of the tree."""

    pages: tuple[str, ...]
    folder: str
    """The working directory, relative to the copy."""
    named: dict[str, str]
    """What stands for a placeholder of the page."""
    shortened: dict[str, str]
    """Options that are appended to a command."""

    def as_typed(self, text: str) -> str:
        """With what the reader has in the place of a placeholder."""
        shorter = self.shortened.get(text)
        for placeholder, name in self.named.items():
            text = re.sub(rf"\b{placeholder}\b", name, text)
        return f"{text} {shorter}" if shorter else text


def table() -> tuple[dict[str, Chain], list[Listed]]:
    """Chains by name, and what they leave out."""
    written: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    chains = {
        name: Chain(tuple(chain["pages"]), chain.get("folder", "."), chain.get("named", {}), chain.get("shortened", {}))
        for name, chain in written["chains"].items()
    }
    listed = [
        Listed(entry["reason"], tuple(entry.get("where", ())), frozenset(entry["commands"]))
        for entry in written["not typed in a chain"]
    ]
    return chains, listed


def typed(chain: Chain, listed: list[Listed]) -> list[Command]:
    """A chain's commands in order: its pages', but for those that are listed. What is shown again, also on a later
    page, is typed once."""
    left_out = frozenset[str]().union(*(entry.texts for entry in listed))
    shown = [command for command in commands() if command.page in chain.pages and command.text not in left_out]
    once: dict[str, Command] = {}
    for command in sorted(shown, key=lambda command: chain.pages.index(command.page)):
        once.setdefault(command.text, command)
    return [*once.values()]
