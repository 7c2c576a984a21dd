"""Every command that README, docs and the other pages show is typed in a chain, or listed with the reason why not; and
what none of them types exists: targets of make, modules, options, files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import ROOT, TABLE, Command, commands, commands_of, table, typed

CHAINS, LISTED = table()
SHOWN = commands()
FILE = re.compile(r"(?:examples|charts|tests|docs|requirements)/[\w./-]+")


def with_place(shown: Iterator[Command] | list[Command]) -> list[object]:
    """As parameters of a test, each text once, named by the place where it stands first."""
    first = {command.text: command for command in reversed([*shown])}
    return [pytest.param(command, id=command.place) for command in reversed(first.values())]


def test_every_command_is_typed_or_listed() -> None:
    known = frozenset[str]().union(*(entry.texts for entry in LISTED))
    known |= {command.text for chain in CHAINS.values() for command in typed(chain, LISTED)}
    missing = [f"{command.place}: {command.text}" for command in SHOWN if command.text not in known]
    assert not missing, f"neither typed in a chain nor listed in {TABLE.relative_to(ROOT)}"


def test_what_is_listed_is_shown_once_and_stands_somewhere() -> None:
    texts = {command.text for command in SHOWN}
    entries = [text for entry in LISTED for text in entry.texts]
    assert sorted(set(entries)) == sorted(entries)
    assert [text for text in entries if text not in texts] == []
    assert [place for entry in LISTED for place in entry.where if not (ROOT / place).exists()] == []
    assert all(entry.reason for entry in LISTED)


def test_the_pages_of_chains_are_there_and_belong_to_one() -> None:
    pages = [page for chain in CHAINS.values() for page in chain.pages]
    assert sorted(set(pages)) == sorted(pages)
    assert all(typed(chain, LISTED) for chain in CHAINS.values())
    assert [page for page in pages if not (ROOT / page).exists()] == []
    for chain in CHAINS.values():
        assert chain.shortened.keys() <= {command.text for command in typed(chain, LISTED)}


@pytest.mark.parametrize("command", with_place(command for command in SHOWN if "make" in command.words))
def test_make_has_the_target_and_its_variables(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    _, target, *settings = command.words[command.words.index("make") :]
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for setting in settings:
        name, _, value = setting.partition("=")
        assert value, f"{setting} is no setting of a variable"
        assert re.search(rf"\b{name}\b", makefile)


@pytest.mark.parametrize("command", with_place(command for command in SHOWN if "-m" in command.words))
def test_a_module_is_there_and_has_the_options(command: Command) -> None:
    _, module, *options = command.words[command.words.index("-m") :]
    if module in ("pytest", "venv"):
        return
    folder = (ROOT if module.startswith("benchmarks") else ROOT / "deploy") / Path(*module.split("."))
    sources = [*folder.glob("*.py")] if folder.is_dir() else [folder.with_suffix(".py")]
    assert sources
    assert all(source.exists() for source in sources)
    text = "\n".join(source.read_text() for source in sources)
    assert [option for option in options if option.startswith("--") and f'"{option}"' not in text] == []


@pytest.mark.parametrize("command", with_place(command for command in SHOWN if FILE.search(command.text)))
def test_a_file_of_ours_that_is_named_exists(command: Command) -> None:
    assert [name for name in FILE.findall(command.text) if not (ROOT / name).exists()] == []


def test_commands_are_read_as_a_shell_and_a_reader_do() -> None:
    page = """`make sure` that `rljob run` and `rljob eval --run` are no commands, and `rljob run a.yaml ...` is none.
```sh
# a comment alone
make test        # all of it
A=1 rljob run job.yaml \\
    --steps 3    # the first

kubectl exec x -- bash -c 'echo "#1"'
```
```yaml
make: nothing
```
Then `.venv/bin/rljob status DIR`.
"""
    assert [(command.line, command.text, command.comment) for command in commands_of(page, "page.md")] == [
        (1, "make sure", ""),
        (4, "make test", "all of it"),
        (5, "A=1 rljob run job.yaml --steps 3", "the first"),
        (8, "kubectl exec x -- bash -c 'echo \"#1\"'", ""),
        (13, ".venv/bin/rljob status DIR", ""),
    ]
    example = commands_of("# Said of it:\n#   rljob run a.yaml b.yaml\nspec: {}   # rljob eval a.yaml\n", "a.yaml")
    assert [(command.place, command.text) for command in example] == [("a.yaml:2", "rljob run a.yaml b.yaml")]
