"""The job's own judge on real torch engines in this process: what it answers, whatever becomes of an engine, is what
transformers says of the question alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from judge_models import CONTEXT, answer_alone, made
from local_engines import LocalEngine

from rljob_api.spec.pools import JudgePool
from rljob_api.spec.reward import Reward
from rljob_trainer.errors import EngineError, JobFileError, RewardError, RewardWorkerError, UnscoredError
from rljob_trainer.pools import dispatch, engine_count, judge_engines
from rljob_trainer.pools.judge_engines import EngineSupply, JudgeEngines, ServedJudge, served_judge
from rljob_trainer.rewards.judge import judge as judging
from rljob_trainer.rewards.judge.question import question_of
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.terms import Response
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.telemetry.names import check_all
from rljob_trainer.waits import Waits

SECONDS = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("judge"), seed=2)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(judging, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(engine_count, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(engine_count, "_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(judge_engines, "_LOOK_SECONDS", 0.02)


class Stage:
    """Starts engines, and remembers them."""

    def __init__(self, folder: Path, **pool: Any) -> None:
        self.folder = folder
        self.pool = JudgePool.model_validate({"model": {"source": str(folder)}, "engine": "torch", **pool})
        self.waits = Waits()
        self.engines: list[LocalEngine] = []
        self.free = True
        """Whether further engines hand over what they have finished."""
        self.problem: Exception | None = None

    async def start(self, name: str, judge: ServedJudge) -> EngineHandle:
        if self.problem is not None:
            raise self.problem
        self.engines.append(LocalEngine(name, judge.files.folder(), free=self.free))
        return self.engines[-1]

    @asynccontextmanager
    async def opened(self, count: int, patience: float = SECONDS) -> AsyncIterator[JudgeEngines]:
        supply = EngineSupply(lambda: served_judge(self.pool, Path()), self.start, 8, patience)
        engines = JudgeEngines(count, supply, self.waits)
        try:
            async with asyncio.timeout(SECONDS):
                await engines.open()
                await until(lambda: sum(s.state == "serving" for s in engines.standings()) == count)
                yield engines
        finally:
            await engines.close()
            await engines.close()


@asynccontextmanager
async def asked(
    engines: JudgeEngines, output: Path | None = None, more: dict[str, Any] | None = None, **judge: Any
) -> AsyncIterator[RewardPool]:
    reward = Reward.model_validate({"functions": [{"type": "judge", "judge": settings(**judge)}], **(more or {})})
    async with RewardPool(reward, longest_response=100, records=output, judge=engines) as opened:
        yield opened
    left = {task.get_name() for task in asyncio.all_tasks()} & {"judge", "judge question"}
    assert not left


def settings(**more: Any) -> dict[str, Any]:
    return {"template": "{response}", "parser": {"low": 0, "high": 9}, "maxTokens": 4, **more}


def responses(count: int) -> list[Response]:
    return [Response("What?", str(i * i), None, "s", 3, "stop", label=f"sample {i}") for i in range(count)]


def question_texts(response: Response) -> list[str]:
    judge = Reward.model_validate({"functions": [{"type": "judge", "judge": settings()}]}).functions[0].judge
    assert judge is not None
    return [message["content"] for message in question_of(judge, "m", response).body["messages"]]


def scores_alone(folder: Path, count: int) -> list[float]:
    """What transformers says of each question by itself, as its chat template, written here once more, has it."""
    scores = []
    for response in responses(count):
        system, user = question_texts(response)
        scores.append(int(answer_alone(folder, f"system: {system}\nuser: {user}\n")) / 9)
    return scores


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.01)


def counts_of(pool: RewardPool) -> dict[str, float]:
    counts = pool.take_counts()
    check_all(counts)
    return {name.removeprefix("judge/judge/"): value for name, value in counts.items()}


async def test_answers_are_the_models_and_both_engines_give_them(folder: Path) -> None:
    stage = Stage(folder)
    expected = scores_alone(folder, 40)
    assert len(set(expected)) >= 4
    async with stage.opened(2) as engines, asked(engines) as pool:
        results = await pool.score_responses(responses(40))
        counts = counts_of(pool)
        assert all("submit" in engine.calls for engine in stage.engines)
    assert [result.score for result in results] == pytest.approx(expected)
    assert {name: counts[name] for name in ("requests", "retries", "unreadable", "failures", "asked_elsewhere")} == {
        "requests": 40,
        **dict.fromkeys(("retries", "unreadable", "failures", "asked_elsewhere"), 0),
    }


async def test_what_a_lost_engine_had_in_hand_is_answered_by_others(folder: Path) -> None:
    stage = Stage(folder)
    stage.free = False
    async with stage.opened(2) as engines, asked(engines) as pool:
        scoring = asyncio.create_task(pool.score_responses(responses(20)))
        # The last question may come when the engines are full already.
        await until(lambda: (sum(standing.running for standing in engines.standings()), engines.waiting) == (16, 4))
        wait = stage.waits.beside["the judge pool"]
        assert wait.reason().startswith("2 of 2 engines to answer 16 questions, oldest ")
        assert wait.reason().endswith("; 4 more in the queue")
        assert 0 < (stage.waits.left(wait) or 0) <= 60  # requestSeconds
        stage.free = True
        stage.engines[0].kill()
        stage.engines[1].may.set()
        results = await scoring
        counts = counts_of(pool)
        await until(lambda: len(stage.engines) == 3 and sum(s.state == "serving" for s in engines.standings()) == 2)
    assert [result.score for result in results] == pytest.approx(scores_alone(folder, 20))
    assert {name: counts[name] for name in ("requests", "retries", "failures", "asked_elsewhere")} == {
        **{"requests": 20, "retries": 0, "failures": 0, "asked_elsewhere": 8},
    }
    assert "the judge pool" not in stage.waits.beside


async def test_while_no_engine_lives_questions_wait_by_name_and_are_answered_later(folder: Path) -> None:
    stage = Stage(folder)
    stage.free = False
    async with stage.opened(1) as engines, asked(engines) as pool:
        scoring = asyncio.create_task(pool.score_responses(responses(5)))
        await until(lambda: sum(standing.running for standing in engines.standings()) == 5)
        stage.problem = EngineError("no place")
        stage.engines[0].kill()
        said = "engines: 0 of 1 are up; 5 more in the queue; the last one failed to start: no place"
        await until(lambda: stage.waits.beside["the judge pool"].reason() == said)
        stage.problem, stage.free = None, True
        results = await scoring
    assert [result.score for result in results] == pytest.approx(scores_alone(folder, 5))


@pytest.mark.parametrize(("on_error", "error"), [("fail", RewardWorkerError), ("drop", UnscoredError)])
async def test_without_engines_until_the_deadline_there_is_an_error_and_no_score(
    folder: Path, on_error: str, error: type[Exception]
) -> None:
    stage = Stage(folder)
    stage.free = False
    async with stage.opened(1) as engines:
        limits = {"requestSeconds": 1, "deadlineSeconds": 1}
        async with asked(engines, more={"onError": on_error}, **limits) as pool:
            stage.problem = EngineError("no place")
            stage.engines[0].kill()
            with pytest.raises(error, match=r"0 of 1 are up.*no place"):
                await pool.score_responses(responses(2))


async def test_an_engine_that_is_not_wanted_hands_back_what_it_has_and_goes(folder: Path) -> None:
    stage = Stage(folder)
    stage.free = False
    async with stage.opened(2) as engines, asked(engines) as pool:
        scoring = asyncio.create_task(pool.score_responses(responses(10)))
        await until(lambda: all(standing.running for standing in engines.standings()))
        for engine in stage.engines:
            engine.may.set()
        engines.want(1)
        results = await scoring
        await until(lambda: [gone.pod for gone in engines.drained] == ["pod-judge-1"])
        assert [standing.name for standing in engines.standings()] == ["judge-0"]
        assert (await pool.score_responses(responses(1)))[0].score == pytest.approx(scores_alone(folder, 1)[0])
        # A drained pod is used again.
        engines.want(2)
        await until(lambda: len(engines.standings()) == 2)
    assert [result.score for result in results] == pytest.approx(scores_alone(folder, 10))
    assert stage.engines[1].dead.is_set()


async def test_a_run_begins_with_an_engine_or_ends_with_what_keeps_it(folder: Path, tmp_path: Path) -> None:
    stage = Stage(folder)
    stage.problem = EngineError("no place")
    with pytest.raises(RewardWorkerError, match="no engine of the judge starts: no place"):
        async with stage.opened(1, patience=0.1):
            pass
    with pytest.raises(JobFileError, match=r"spec\.judge\.maxContextTokens: 4096 is more than the model's context"):
        async with Stage(folder, maxContextTokens=4096).opened(1):
            pass
    with pytest.raises(JobFileError, match=r"has no \*\.safetensors"):
        async with Stage(tmp_path).opened(1):
            pass


async def test_a_question_longer_than_the_context_has_no_score_and_others_have(folder: Path) -> None:
    async with Stage(folder).opened(1) as engines, asked(engines) as pool:
        with pytest.raises(RewardError, match=f"sample 0.*exceed the judge's context of {CONTEXT}"):
            await pool.score_responses([Response("", "x" * CONTEXT, None, "s", 3, "stop", label="sample 0")])
        (result,) = await pool.score_responses(responses(1))
    assert result.score == pytest.approx(scores_alone(folder, 1)[0])


async def test_answers_are_remembered_as_those_of_one_model(folder: Path, tmp_path: Path) -> None:
    """A run that goes on asks again what another model answered, and nothing else."""
    other = made(tmp_path / "other", seed=3)
    counts = []
    for source in (folder, folder, other):
        async with Stage(source).opened(1) as engines, asked(engines, tmp_path) as pool:
            results = await pool.score_responses(responses(6))
            counts.append((counts_of(pool)["requests"], counts_of(pool)["requests_of_run"]))
        assert [result.score for result in results] == pytest.approx(scores_alone(source, 6))
    assert counts == [(6, 6), (0, 6), (6, 12)]
    (record,) = (tmp_path / "judges").iterdir()
    answers = [json.loads(line) for line in record.read_text().splitlines() if "score" in line]
    assert len(answers) == 12


async def test_a_warm_judge_says_the_same_when_it_is_asked_the_same_again(folder: Path) -> None:
    said = []
    for _ in range(2):
        async with (
            Stage(folder).opened(1) as engines,
            asked(engines, cache=False, temperature=1.0, attempts=10) as pool,
        ):
            said.append([result.score for result in await pool.score_responses(responses(20))])
    assert said[0] == said[1] != pytest.approx(scores_alone(folder, 20))


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}\n",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        None,
    ],
    ids=["no system message", "it is left out", "no template"],
)
async def test_a_judge_without_system_messages_gets_all_in_one(tmp_path: Path, template: str | None) -> None:
    folder = made(tmp_path / "judge", seed=2, template=template)
    async with Stage(folder).opened(1) as engines, asked(engines) as pool:
        (result,) = await pool.score_responses(responses(1))
    system, user = question_texts(responses(1)[0])
    end = "\n\n" if template is None else ""  # jinja takes the last line's end for its own
    assert result.score == pytest.approx(int(answer_alone(folder, f"{system}\n\n{user}{end}")) / 9)


def test_its_own_chat_template_replaces_the_tokenizers(folder: Path) -> None:
    model = {"source": str(folder), "chatTemplate": "mine: {{ messages[0].content }}"}
    pool = JudgePool.model_validate({"model": model, "engine": "torch", "maxContextTokens": 100})
    judge = served_judge(pool, Path())
    assert judge.chat.render([{"role": "user", "content": "a"}]) == "mine: a"
    assert (judge.context, judge.stop_token_ids) == (100, (0,))


async def test_questions_that_queue_behind_answered_ones_are_not_late(folder: Path) -> None:
    """Answers come one by one for longer than the deadline; then nothing comes for the time of a request."""
    stage = Stage(folder)
    stage.free = False
    async with (
        stage.opened(1) as engines,
        asked(engines, requestSeconds=1, deadlineSeconds=2) as pool,
    ):
        scoring = asyncio.create_task(pool.score_responses(responses(60)))
        for _ in range(3):
            await until(lambda: sum(standing.running for standing in engines.standings()) == 8)
            await asyncio.sleep(0.8)
            stage.engines[0].may.set()
            before = engines.waiting
            await until(lambda: engines.waiting < before)  # noqa: B023  it is waited for in this turn
            stage.engines[0].may.clear()
        # Whoever waits is told of a failed try by now, and is asked again.
        await asyncio.sleep(1.3)
        stage.engines[0].may.set()
        results = await scoring
        assert counts_of(pool)["retries"] > 0
    assert [result.score for result in results] == pytest.approx(scores_alone(folder, 60))


async def test_a_question_with_which_three_engines_are_lost_is_asked_no_more(folder: Path) -> None:
    """Nothing but the question tells that it is to blame. The fourth engine answers others."""
    stage = Stage(folder)
    stage.free = False
    async with stage.opened(1) as engines, asked(engines, more={"onError": "drop"}) as pool:
        scoring = asyncio.create_task(pool.score_responses(responses(1)))
        for number in range(3):
            await until(lambda: len(stage.engines) > number and "submit" in stage.engines[number].calls)  # noqa: B023
            stage.engines[number].kill()
        with pytest.raises(UnscoredError, match=r"3 engines were lost while answering it.*is gone \(killed\)") as e:
            await scoring
        assert e.value.exit_code == RewardWorkerError.exit_code
        await until(lambda: len(stage.engines) == 4)
        stage.engines[3].may.set()
        (result,) = await pool.score_responses([Response("What?", "other", None, "s", 3, "stop", label="other")])
        assert counts_of(pool)["asked_elsewhere"] == 3
    assert result.error is None


async def test_an_engine_that_dies_on_its_first_work_is_replaced_after_a_pause_and_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_count, "_PAUSE_SECONDS", 3600.0)
    stage = Stage(folder)
    stage.free = False
    async with stage.opened(2) as engines, asked(engines) as pool:
        scoring = asyncio.create_task(pool.score_responses(responses(2)))
        await until(lambda: all("submit" in engine.calls for engine in stage.engines))
        stage.engines[0].kill()
        said = "; engine judge-0 was lost before it finished any request: engine judge-0 is gone (killed)"
        await until(lambda: stage.waits.beside["the judge pool"].reason().endswith(said))
        await until(lambda: [s.name for s in engines.standings()] == ["judge-1", "judge-2"])
        # The pause goes on, and the one that is there answers.
        stage.engines[1].may.set()
        await scoring
        await pool.score_responses(responses(3))
        assert len(stage.engines) == 2
        stage.engines[1].may.clear()
        last = asyncio.create_task(pool.score_responses(responses(4)))
        await until(lambda: "the judge pool" in stage.waits.beside)
        await until(lambda: "was lost" not in stage.waits.beside["the judge pool"].reason())
        # One that had answered is replaced at once.
        stage.engines[1].kill()
        stage.free = True
        await until(lambda: len(stage.engines) == 3)
        await last


async def test_a_budget_of_tokens_bounds_a_batch_whose_questions_all_begin_at_once(folder: Path) -> None:
    """As questions are estimated before they are counted (three characters a token, and the longest answer) 18 fit."""
    texts = question_texts(responses(1)[0])
    least = sum(map(len, texts)) // 3 + 4
    most = 18 * least + least // 2
    more = {"onError": "score", "errorScore": -1}
    async with Stage(folder).opened(2) as engines, asked(engines, more=more, mostTokens=most) as pool:
        results = await pool.score_responses(responses(40))
        counts = counts_of(pool)
    assert counts["tokens"] > most  # in this tokenizer a character is a token
    assert counts["requests"] == sum(result.error is None for result in results) == 18
    assert all(f"mostTokens = {most}" in result.error for result in results if result.error is not None)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% if %}", "cannot render a question"),
        ("{{ raise_exception('never') }}", r"cannot render a question \(.*never"),
        ("Say 1.", "drops the content of a question"),
    ],
    ids=["it does not compile", "it always raises", "it says the same always"],
)
async def test_a_chat_template_that_renders_no_question_is_a_mistake_of_the_job(
    folder: Path, tmp_path: Path, template: str, problem: str
) -> None:
    stage = Stage(folder, model={"source": str(folder), "chatTemplate": template})
    with pytest.raises(JobFileError, match=rf"^spec\.judge\.model\.chatTemplate: the chat template {problem}"):
        async with stage.opened(1):
            pass
    assert not stage.engines
    of_the_model = made(tmp_path / "judge", template=template)
    said = (
        "chat_template.jinja is not a Jinja template"
        if "%" in template
        else f"^spec\\.judge\\.model\\.source: .* {problem}"
    )
    with pytest.raises(JobFileError, match=said):
        served_judge(JudgePool.model_validate({"model": {"source": str(of_the_model)}, "engine": "torch"}), Path())


async def test_a_context_in_which_no_question_fits_is_a_mistake_of_the_job(folder: Path) -> None:
    """Whatever ``onError`` says: with errorScore for all samples nothing would be learned."""
    more = {"onError": "score", "errorScore": 0}
    async with Stage(folder, maxContextTokens=100).opened(1) as engines:
        async with asked(engines, more=more) as pool:
            results = await pool.score_responses(responses(31))
            assert all("context of 100" in (result.error or "") for result in results)
            with pytest.raises(
                JobFileError, match=r"spec\.judge\.maxContextTokens: none of the first 32 questions fits"
            ):
                await pool.score_responses(responses(32))
        async with asked(engines, more=more, maxTokens=100) as pool:
            with pytest.raises(JobFileError, match=r"spec\.judge\.maxContextTokens: no question can fit"):
                await pool.score_responses(responses(1))
    long = [Response("", "x" * CONTEXT, None, "s", 3, "stop", label="long")]
    async with Stage(folder).opened(1) as engines, asked(engines, more=more, cache=False) as pool:
        await pool.score_responses(responses(1))
        for _ in range(40):
            (result,) = await pool.score_responses(long)
            assert result.error is not None


async def test_the_date_of_its_questions_is_the_runs_and_their_form_is_part_of_what_is_remembered(folder: Path) -> None:
    def served(template: str | None, day: int) -> ServedJudge:
        model = {"source": str(folder), **({} if template is None else {"chatTemplate": template})}
        pool = JudgePool.model_validate({"model": model, "engine": "torch"})
        return served_judge(pool, Path(), datetime(2020, 2, day))

    dated = "{{ strftime_now('%d.%m.%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert served(dated, 3).chat.render([{"role": "user", "content": "a"}]) == "03.02.2020a"
    forms = [served(None, 3).form, served(plain, 3).form, served(dated, 3).form, served(dated, 4).form]
    assert len(set(forms)) == 4
    assert (served(None, 4).form, served(plain, 4).form) == (forms[0], forms[1])
    assert forms[0] == ""
    stage = Stage(folder, model={"source": str(folder), "chatTemplate": plain})
    async with stage.opened(1) as engines:
        asker = engines.asked_by("judge", 1.0)
        await asker.open()
        assert asker.model.endswith(f" {forms[1]}")


async def test_an_engine_that_takes_nothing_does_not_keep_questions_from_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_SUBMIT_SECONDS", 0.05)
    stage = Stage(folder)
    async with stage.opened(2) as engines, asked(engines, cache=False) as pool:
        stage.engines[0].hangs = True
        first = asyncio.create_task(pool.score_responses(responses(2)))
        try:
            await until(lambda: "submit" in stage.engines[0].calls)
            for _ in range(2):
                others = await pool.score_responses(responses(12))
                assert [result.score for result in others] == pytest.approx(scores_alone(folder, 12))
            assert stage.engines[0].calls.count("submit") == 1
            assert not first.done()
        finally:
            stage.engines[0].kill()
        assert [result.score for result in await first] == pytest.approx(scores_alone(folder, 2))
