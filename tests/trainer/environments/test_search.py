"""The tool that searches: ranks beside BM25 written out, what the model is told, what is kept and what is refused."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
from written_model import CHAT, Hangs, Written

from rljob_api import load_jobs, resolve
from rljob_api.spec.environment import CorpusSpec, StopwordsLanguage, ToolSpec
from rljob_trainer.environments import environment_of
from rljob_trainer.environments.named_tools import tool_of
from rljob_trainer.environments.search import kept
from rljob_trainer.environments.search.corpus import Corpus
from rljob_trainer.environments.search.index import PassageIndex, WordIds, words
from rljob_trainer.environments.tools import Tool, ToolError
from rljob_trainer.episodes.environment import Task, tasks_of
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.episodes.requests import SamplingSettings
from rljob_trainer.errors import CheckpointError, DataError, JobFileError
from rljob_trainer.record.boundary import Boundary, Totals
from rljob_trainer.world.protocol import WorldError

FIELD = "spec.rollout.environment.tools[0]"
FACTS = [
    {"title": "Red fox", "text": "The red fox eats mice, and mice again."},
    {"title": "Grey wolf", "text": "The wolf hunts deer in a pack."},
    {"title": "Fennec", "text": "A small fox of the desert."},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rljob" / "search"


def written(folder: Path, rows: Sequence[Any], name: str = "facts.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def search_of(path: Path, said: list[str] | None = None, **settings: Any) -> Tool:
    settings = {"title": "title", **settings}
    given = ToolSpec(type="search", corpus=CorpusSpec(source=path.name, **settings))
    return tool_of(given, FIELD, path.parent, None, (said if said is not None else []).append)


def plain_bm25(texts: Sequence[list[str]], query: list[str], k1: float, b: float) -> list[float]:
    """BM25 as Lucene has it (Kamphuis et al. 2020, table 1, "accurate"), from its definition."""
    mean, scores = sum(map(len, texts)) / len(texts), []
    for text in texts:
        score = 0.0
        for word in query:
            df, tf = sum(word in other for other in texts), text.count(word)
            idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
            score += idf * tf / (tf + k1 * (1 - b + b * len(text) / mean)) if tf else 0.0
        scores.append(score)
    return scores


@pytest.mark.slow(stands_for="[1.5-0.75]")
@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4), (0.0, 0.0)])
def test_scores_and_order_are_those_of_bm25(k1: float, b: float) -> None:
    chance = random.Random(1)
    vocabulary = [f"w{number}" for number in range(40)]
    texts = [chance.choices(vocabulary, k=chance.randrange(1, 30)) for _ in range(200)]
    ids = WordIds(None)
    given = CorpusSpec(source="x", k1=k1, b=b)
    index = PassageIndex.of([ids.of(" ".join(text)) for text in texts], ids, given)
    for _ in range(20):
        query = chance.choices([*vocabulary, "unknown"], k=3)
        expected = plain_bm25(texts, query, k1, b)
        assert index.scores(" ".join(query)).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        best = index.best(" ".join(query), 7)
        assert all(expected[number] > 0 for number in best)
        worst = min((expected[number] for number in best), default=0.0)
        others = [score for number, score in enumerate(expected) if number not in best]
        assert max(others) <= worst + 1e-5


def test_of_equal_passages_the_first_comes_first() -> None:
    ids = WordIds(None)
    texts = [ids.of(text) for text in ["b", "a", "a b", "a", "c", "a", "a"]]
    index = PassageIndex.of(texts, ids, CorpusSpec(source="x"))
    assert index.best("a", 3) == [1, 3, 5]
    assert index.best("a", 9) == [1, 3, 5, 6, 2]
    assert index.best("nothing", 3) == []
    assert index.best("", 3) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Don't stop-me, 3.5 kg!", ["don", "t", "stop", "me", "3", "5", "kg"]),
        ("Straße CAFE\u0301 ﬁne", ["strasse", "café", "fine"]),
        ("東京タワー in 2024年", ["東", "京", "タ", "ワ", "ー", "in", "2024", "年"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("  \n—…", []),
    ],
)
def test_words_are_told_apart_in_any_script(text: str, found: list[str]) -> None:
    assert words(text) == found


async def test_the_model_is_told_passages_by_number_with_their_titles(tmp_path: Path) -> None:
    tool = search_of(written(tmp_path, FACTS), passages=2)
    assert await tool({"query": "What does the FOX eat?"}) == (
        "Doc 1(Title: Red fox) The red fox eats mice, and mice again.\nDoc 2(Title: Fennec) A small fox of the desert."
    )
    assert await tool({"query": "fennec"}) == "Doc 1(Title: Fennec) A small fox of the desert."
    assert await tool({"query": "penguin"}) == "No passage has any of these words."
    assert tool.schema["function"]["name"] == "search"
    assert tool.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }


async def test_wrong_calls_are_told_to_the_model(tmp_path: Path) -> None:
    tool = search_of(written(tmp_path, FACTS))
    for given, said in [
        ({"query": " \n"}, "the query is empty"),
        ({}, "query: Field required"),
        ({"query": ["fox"]}, "query: Input should be a valid string"),
        ({"query": "fox", "k": 9}, "k: Extra inputs are not permitted"),
    ]:
        with pytest.raises(ToolError, match=said):
            await tool(given)


async def test_long_passages_are_cut_and_titles_may_be_absent(tmp_path: Path) -> None:
    rows = [{"text": "naïve 東京 " * 10}, {"text": "other"}, {"text": ""}]
    tool = search_of(written(tmp_path, rows), title=None, passage_characters=9)
    assert await tool({"query": "NAI\u0308VE"}) == "Doc 1: naïve 東京 ..."
    assert await tool({"query": "other"}) == "Doc 1: other"
    untitled = search_of(written(tmp_path, [{"title": None, "text": "a fact"}], "one.jsonl"), passages=1)
    assert await untitled({"query": "fact"}) == "Doc 1: a fact"


async def test_stopwords_are_left_out_of_passages_and_queries(tmp_path: Path) -> None:
    path = written(tmp_path, FACTS)
    assert (await search_of(path)({"query": "the"})).startswith("Doc 1")
    assert await search_of(path, stopwords="english")({"query": "The"}) == "No passage has any of these words."


def test_every_language_of_stopwords_is_one_of_the_package(tmp_path: Path) -> None:
    for language in get_args(StopwordsLanguage):
        assert WordIds(language).of("qwertyuiop") == [0]


@pytest.mark.parametrize(
    ("text", "settings", "error", "said"),
    [
        ("", {}, DataError, r"facts\.jsonl is empty"),
        ("\n\n", {}, DataError, r"facts\.jsonl has only empty lines"),
        ('{"text": "a"}\n{"text":\n', {}, DataError, r"facts\.jsonl, line 2: not valid JSON"),
        ('{"text": "a"}\n{"t": "b"}\n', {}, DataError, r'line 2: the row has no column "text" \(set by .*corpus\.text'),
        (
            '{"text": "a"}\n{"text": null}\n',
            {},
            DataError,
            r'line 2: the column "text" \(set by .*corpus\.text\) is',
        ),
        ('{"text": "a"}\n\n{"text": 3}\n', {}, DataError, r'line 3: the column "text" .* is int, not text'),
        ('{"text": "a"}\n{"text": "b"}\n', {"title": "title"}, DataError, r'line 1: .*"title" .*corpus\.title'),
        (
            '{"text": "a"}\n{"text": "b"}\n',
            {"passages": 3},
            JobFileError,
            r"corpus\.passages: 3 per call is more than the 2 of",
        ),
        ('{"text": "!"}\n{"text": "?"}\n', {}, DataError, r"no passage has a searchable word"),
        (None, {}, DataError, r"tools\[0\]\.corpus\.source: there is no file .*facts\.jsonl"),
    ],
)
def test_a_corpus_that_is_none_is_refused(
    tmp_path: Path, text: str | None, settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    path = tmp_path / "facts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=said):
        search_of(path, **{"title": None, "passages": 1, **settings})


async def test_an_index_is_made_once(tmp_path: Path, cache: Path) -> None:
    path, said = written(tmp_path, FACTS), list[str]()
    first = search_of(path, said)
    (made,) = cache.iterdir()
    assert [line.partition(" in ")[0] for line in said] == [f"{FIELD}.corpus: indexed 3 passages"]
    moved = written(tmp_path, FACTS, "elsewhere.jsonl")
    again = search_of(moved, said, passages=1)
    assert len(said) == 1
    assert await again({"query": "fox mice"}) == (await first({"query": "fox mice"})).partition("\n")[0]
    assert list(cache.iterdir()) == [made]
    for changes in ({"k1": 1.2}, {"b": 0.4}, {"stopwords": "english"}):
        search_of(path, said, **changes)
    search_of(written(tmp_path, [*FACTS, {"title": "", "text": "new"}], "more.jsonl"), said)
    assert len(said) == 5
    assert len(list(cache.iterdir())) == 5


@pytest.mark.parametrize("harm", ["cut", "bit", "lost", "foreign", "manifest", "no manifest", "file"])
async def test_a_damaged_or_foreign_index_is_made_anew(tmp_path: Path, cache: Path, harm: str) -> None:
    path, said = written(tmp_path, FACTS), list[str]()
    told = await search_of(path)({"query": "fox mice"})
    (made,) = cache.iterdir()
    data = made / "data.csc.index.npy"
    whole = data.read_bytes()
    if harm == "cut":
        data.write_bytes(whole[:-4])
    elif harm == "bit":
        data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif harm == "lost":
        data.unlink()
    elif harm == "foreign":
        search_of(written(tmp_path, FACTS[:2], "two.jsonl"), passages=1)
        (other,) = (folder for folder in cache.iterdir() if folder != made)
        made.rename(tmp_path / "old")
        other.rename(made)
    elif harm == "no manifest":
        (made / kept.MANIFEST).unlink()
    elif harm == "manifest":
        (made / kept.MANIFEST).write_text("[]")
    else:
        made.rename(tmp_path / "old")
        made.write_text("no folder")
    again = search_of(path, said)
    assert await again({"query": "fox mice"}) == told
    assert [line.partition("(")[0] for line in said[:-1]] == [f"the index in {made} cannot be used "]
    assert said[-1].startswith(f"{FIELD}.corpus: indexed 3 passages")
    said.clear()
    assert await search_of(path, said)({"query": "fox mice"}) == told
    assert said == []


async def test_of_two_runs_that_make_an_index_at_once_both_keep_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = written(tmp_path, FACTS), list[str]()
    saving = PassageIndex.save

    def other_first(index: PassageIndex, folder: Path) -> None:
        monkeypatch.setattr(PassageIndex, "save", saving)
        search_of(path)
        (made,) = (each for each in cache.iterdir() if each.name != folder.name)
        seen.append(made.stat().st_ino)
        saving(index, folder)

    seen: list[int] = []
    monkeypatch.setattr(PassageIndex, "save", other_first)
    search_of(path, said)
    assert [line.partition(" in ")[0] for line in said] == [f"{FIELD}.corpus: indexed 3 passages"]
    assert [each.stat().st_ino for each in cache.iterdir()] == seen


@pytest.mark.parametrize("line", ['{"title": "Red fox", "text": "The red fox eats mice, and rice again."}', "{"])
async def test_a_passage_that_is_changed_under_a_run_is_no_answer(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, FACTS)
    tool = search_of(path)
    told = await tool({"query": "wolf"})
    whole = path.read_bytes()
    with path.open("r+b") as file:  # in place, as long as it was
        file.write(line.ljust(whole.index(b"\n")).encode())
    with pytest.raises(
        WorldError, match=rf"line 1 is not the passage that this run has indexed for {re.escape(FIELD)}"
    ):
        await tool({"query": "mice"})
    assert await tool({"query": "wolf"}) == told


def test_passages_that_change_between_their_digest_and_their_index_are_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sealed = written(tmp_path, FACTS), Corpus.sealed

    def changed_behind(corpus: Corpus, *args: Any) -> str:
        digest = sealed(corpus, *args)
        path.write_bytes(path.read_bytes().replace(b"deer", b"hare"))
        return digest

    monkeypatch.setattr(Corpus, "sealed", changed_behind)
    with pytest.raises(DataError, match="line 2 is not the passage that this run has indexed"):
        search_of(path)
    assert not cache.exists()


async def test_a_cache_that_cannot_be_read_costs_nothing_but_time(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.symlink_to(cache)
    said = list[str]()
    tool = search_of(written(tmp_path, FACTS), said)
    assert await tool({"query": "wolf"}) == "Doc 1(Title: Grey wolf) The wolf hunts deer in a pack."
    assert said[-1].startswith(f"cannot keep the index in {cache} (")


async def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    said = list[str]()
    tool = search_of(written(tmp_path, FACTS), said)
    assert await tool({"query": "wolf"}) == "Doc 1(Title: Grey wolf) The wolf hunts deer in a pack."
    assert said[-1].startswith(f"cannot keep the index in {cache} (")


JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: searching}
spec:
  model: {source: org/model}
  data: {train: {source: train.jsonl}, answer: answer}
  rollout:
    environment: {type: tools, tools: [{type: search, corpus: {source: facts.jsonl, title: title, passages: 1}}]}
  reward: {functions: [{type: exactMatch}]}
  algorithm: {preset: grpo}
  stop: {steps: 1}
"""
CALL = '<tool_call>{"name": "search", "arguments": {"query": "fennec"}}</tool_call>'
TOLD = "Doc 1(Title: Fennec) A small fox of the desert."


async def environment(stack: AsyncExitStack, base: Path, change: str = "passages: 1") -> Programs:
    (job,) = load_jobs(JOB.replace("passages: 1", change))
    made = await environment_of(resolve(job).spec, CHAT, base / "episodes", base, stack, lambda _: None)
    stack.callback(made.close)
    assert isinstance(made, Programs)
    return made


def asked() -> Task:
    messages = ({"role": "user", "content": "What is a fennec?"},)
    text = CHAT.render(messages)
    prompt = Prompt(0, 0, 0, "s", text, tuple(CHAT.encode(text)), "a fox", messages=messages)
    return tasks_of(prompt, [0], SamplingSettings(max_tokens=2000), seed=1)[0]


async def lost_after_its_search(base: Path) -> None:
    """A process that is lost while the model is asked a second time."""
    async with AsyncExitStack() as stack:
        playing = asyncio.ensure_future((await environment(stack, base)).play([asked()], model := Hangs(CALL)))
        await model.asked_again.wait()
        playing.cancel()


async def test_a_resumed_episode_does_not_search_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, FACTS)
    await lost_after_its_search(tmp_path)

    def again(self: PassageIndex, query: str, most: int) -> list[int]:
        raise AssertionError(f"searched again for {query}")

    monkeypatch.setattr(PassageIndex, "best", again)
    async with AsyncExitStack() as stack:
        second = await environment(stack, tmp_path)
        (episode,) = await second.play([asked()], Written(CALL, "A fox."))
        assert [message["content"] for message in episode.messages[2:]] == [TOLD, "A fox."]
        assert second.take_counts()["rollout/diverged_episodes"] == 0
        assert second.take_counts()["rollout/tool_errors"] == 0


@pytest.mark.parametrize("change", ["passages: 2", "passages: 1, k1: 0.9", "passages: 1, passageCharacters: 50"])
async def test_an_open_episode_begins_anew_under_other_settings(tmp_path: Path, change: str) -> None:
    written(tmp_path, FACTS)
    await lost_after_its_search(tmp_path)
    async with AsyncExitStack() as stack:
        second = await environment(stack, tmp_path, change)
        (episode,) = await second.play([asked()], Written(CALL, "A fox."))
        assert episode.messages[2]["content"] == TOLD
        assert second.take_counts()["rollout/diverged_episodes"] == 1


async def test_a_run_goes_on_with_the_passages_that_it_began_with(tmp_path: Path) -> None:
    written(tmp_path, FACTS)
    digests = []
    for rows in (FACTS, FACTS[::-1]):
        written(tmp_path, rows)
        async with AsyncExitStack() as stack:
            digests.append((await environment(stack, tmp_path)).corpora())
    first, other = digests
    assert list(first) == list(other) == ["search"]
    boundary = Boundary("a run", Totals(), {}, {}, (), 8, {}, corpora=first)
    read = Boundary.of(json.loads(json.dumps(boundary.to_state())), "here")
    read.check_corpora(first, "here")
    read.check_corpora({}, "here")
    with pytest.raises(CheckpointError, match="the corpus of the tool search has changed since checkpoint here was"):
        read.check_corpora(other, "here")


async def test_calls_at_once_are_answered_while_the_loop_goes_on(tmp_path: Path) -> None:
    chance = random.Random(3)
    rows = [{"title": f"t{i}", "text": " ".join(chance.choices("abcdefghij", k=20)) + f" n{i}"} for i in range(500)]
    tool = search_of(written(tmp_path, rows), passages=1)

    async def one(number: int) -> str:
        async with tool.turn:
            return await tool({"query": f"a b n{number}"})

    for number, said in enumerate(await asyncio.gather(*map(one, range(100)))):
        assert said.startswith(f"Doc 1(Title: t{number}) ")


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("I think so. <answer>The Eiffel Tower.</answer>", 1.0),
        ("<answer>London</answer> no: <answer> la tour eiffel </answer>", 1.0),
        ("<answer>Eiffel</answer>", 0.0),
        ("The Eiffel Tower", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>Eiffel Tower</answer> or <answer>London</answer>", 0.0),
    ],
)
def test_the_example_s_reward_is_an_exact_match(monkeypatch: pytest.MonkeyPatch, said: str, score: float) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "search")
    exact_match = importlib.import_module("search_reward").exact_match
    conversation = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": said}]
    assert exact_match(conversation, ["Eiffel Tower", "La Tour Eiffel"])["score"] == score


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="Numba comes with vLLM, which is not here")
def test_numba_is_not_imported_and_still_can_be() -> None:
    """In a process of its own, since others may have imported it. An engine of vLLM's CPU build does not start beside
    llvmlite, which comes with Numba."""
    code = (
        "import sys; from rljob_trainer.environments.search.index import package; found = package(); "
        "assert 'llvmlite' not in sys.modules; assert found.BM25; import numba; assert 'llvmlite' in sys.modules; "
        "assert not any(type(f).__name__ == '_NotFound' for f in sys.meta_path)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
