"""The endpoint before an engine of fixed speed: the engine's rate with many episodes open, and the time that is added.

    .venv/bin/python -m benchmarks.endpoint

OpenAI's client asks in a process of its own; beside it the same episodes ask in the driver's process, without HTTP. All
sides run in turn, several times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import string
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.endpoint.clients import QUESTION
from benchmarks.endpoint.engine import FixedSpeed, FixedTime
from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, table, write_results
from rljob_trainer.data.chat import ChatTemplate
from rljob_trainer.endpoint.chat_answer import ReadAnswer
from rljob_trainer.endpoint.server import Endpoint, serving_endpoint
from rljob_trainer.episodes.environment import LanguageModel, Task, tasks_of
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import EpisodeLimits, Voice
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.episodes.requests import SamplingSettings
from rljob_trainer.models.tokenizer import character_tokenizer
from rljob_trainer.world.protocol import World

HERE = Path(__file__).parent
EPISODES, RATE, LENGTH, TURNS = 500, 2000.0, 32, 3
WARM_SECONDS, RATE_SECONDS = 20.0, 30.0
ASKING, PERIOD, ASKED, ENGINE_SECONDS, SHORT = 100, 1.0, 15, 0.05, 16
GOAL_RATE, GOAL_SECONDS = 0.95, 0.005
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)
DIRECT, OVER_HTTP, BARE = "in the driver's process", "through the endpoint", "a server that only waits"


@dataclass(frozen=True, slots=True)
class MeasuredEndpoint:
    """One repetition of one side."""

    rate: float | None
    """Share of the engine's rate; None: not measured."""
    median: float
    """Seconds of a request beyond the engine's time."""
    ninety_fifth: float


@dataclass(frozen=True, slots=True)
class EndpointSide:
    """All repetitions of one side."""

    name: str
    rate: MeasuredSpread | None
    median: MeasuredSpread
    ninety_fifth: MeasuredSpread

    @classmethod
    def of(cls, name: str, runs: list[MeasuredEndpoint]) -> EndpointSide:
        rates = [run.rate for run in runs if run.rate is not None]
        return cls(
            name,
            MeasuredSpread.of(rates) if rates else None,
            MeasuredSpread.of([run.median for run in runs]),
            MeasuredSpread.of([run.ninety_fifth for run in runs]),
        )


class Clients:
    """The agents' process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ended: dict[str, asyncio.Future[list[float]]] = {}

    async def ask(self, base_url: str, api_key: str, offset: float) -> list[float]:
        """The seconds of an agent's requests."""
        assert self._process.stdin is not None
        ended = self._ended[api_key] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(
            json.dumps({"base_url": base_url, "api_key": api_key, "offset": offset}).encode() + b"\n"
        )
        return await ended

    async def read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            told = json.loads(line)
            self._ended.pop(told["api_key"]).set_result(told["seconds"])


@asynccontextmanager
async def clients(turns: int, seconds: float) -> AsyncIterator[Clients]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.endpoint.clients", str(turns), str(seconds), stdin=pipe, stdout=pipe
    )
    made = Clients(process)
    reading = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        reading.cancel()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def chat() -> ChatTemplate:
    tokenizer = character_tokenizer(string.ascii_letters + string.digits + " <>;", 100_000)
    tokenizer.chat_template = TEMPLATE
    return ChatTemplate(tokenizer)


class ByHand:
    """The program of an episode that asks without HTTP, as the clients do with it."""

    def __init__(self, turns: int, seconds: float, offset: Callable[[Task], float]) -> None:
        self.took: list[float] = []
        self._turns, self._seconds, self._offset = turns, seconds, offset

    async def __call__(self, task: Task, model: Voice, world: World) -> None:
        await asyncio.sleep(self._offset(task))
        messages: list[Any] = [QUESTION]
        begun = time.perf_counter()
        for turn in range(self._turns):
            await asyncio.sleep(max(0.0, begun + turn * self._seconds - time.perf_counter()))
            asked = time.perf_counter()
            answer = await model.chat(messages)
            self.took.append(time.perf_counter() - asked)
            messages = [*messages, answer.message, {"role": "user", "content": "and now"}]


class ByClients:
    """The program of an episode that the clients' process plays."""

    def __init__(
        self, endpoint: Endpoint, asking: Clients, formed: ChatTemplate, offset: Callable[[Task], float]
    ) -> None:
        self.took: list[float] = []
        self._endpoint, self._asking, self._formed, self._offset = endpoint, asking, formed, offset

    async def __call__(self, task: Task, model: Voice, world: World) -> None:
        with self._endpoint.open(model, task.sampling, self._formed, ReadAnswer, own_seconds=3600) as episode:
            client = episode.client
            self.took += await self._asking.ask(client.base_url, client.api_key, self._offset(task))


@asynccontextmanager
async def program_of(
    side: str, turns: int, seconds: float, formed: ChatTemplate, offset: Callable[[Task], float]
) -> AsyncIterator[ByHand | ByClients]:
    if side == DIRECT:
        yield ByHand(turns, seconds, offset)
        return
    async with serving_endpoint() as endpoint, clients(turns, seconds) as asking:
        yield ByClients(endpoint, asking, formed, offset)


@asynccontextmanager
async def environment_of(program: ByHand | ByClients, formed: ChatTemplate) -> AsyncIterator[Programs]:
    with tempfile.TemporaryDirectory() as folder:
        log = EpisodeLog(Path(folder) / "episodes")
        yield Programs(program, log, formed, EpisodeLimits(1000, prompt_tokens=4096))
        log.close()


def task_of(number: int, formed: ChatTemplate) -> Task:
    text = formed.render([QUESTION])
    prompt = Prompt(number, 0, 0, "s", text, tuple(formed.encode(text)), None, messages=[QUESTION])
    return tasks_of(prompt, [0], SamplingSettings(max_tokens=20_000), seed=1)[0]


async def rate_of(side: str) -> float:
    """The share of its rate that the engine has while many episodes are open."""
    formed = chat()
    engine = FixedSpeed(RATE, LENGTH, formed.encode(string.ascii_lowercase))
    numbers = iter(range(1 << 30))

    async def one_after_the_other(programs: Programs) -> None:
        while True:
            task = task_of(next(numbers), formed)
            await programs.play([task], engine)
            programs.settled([], task.id.ordinal + 1)

    async with (
        program_of(side, TURNS, 0.0, formed, lambda _: 0.0) as program,
        environment_of(program, formed) as programs,
    ):
        running = [asyncio.create_task(one_after_the_other(programs)) for _ in range(EPISODES)]
        running.append(asyncio.create_task(engine.run()))
        await asyncio.sleep(WARM_SECONDS)
        made, begun = engine.made, time.perf_counter()
        await asyncio.sleep(RATE_SECONDS)
        share = (engine.made - made) / (RATE * (time.perf_counter() - begun))
        failed = [task for task in running if task.done()]
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    if failed:
        failed[0].result()
    return share


async def added_by(side: str) -> list[float]:
    """Seconds of requests beyond those of the engine, sorted: one request every ``PERIOD / ASKING`` seconds."""
    formed = chat()
    engine: LanguageModel = FixedTime(ENGINE_SECONDS, SHORT, formed.encode(string.ascii_lowercase))

    def offset(task: Task) -> float:
        return 2.0 + task.id.ordinal * PERIOD / ASKING  # when all clients are there

    if side == BARE:
        async with bare_server() as url, clients(ASKED, PERIOD) as asking:
            of_all = await asyncio.gather(
                *(asking.ask(url, f"key-{n}", offset(task_of(n, formed))) for n in range(ASKING))
            )
            took = [seconds for one in of_all for seconds in one]
    else:
        async with (
            program_of(side, ASKED, PERIOD, formed, offset) as program,
            environment_of(program, formed) as programs,
        ):
            await asyncio.gather(*(programs.play([task_of(n, formed)], engine) for n in range(ASKING)))
            took = program.took
    if len(took) != ASKING * ASKED:
        raise ValueError(f"{len(took)} requests were answered, not {ASKING * ASKED}")
    return sorted(seconds - ENGINE_SECONDS for seconds in took)


@asynccontextmanager
async def bare_server() -> AsyncIterator[str]:
    """Says the same to everybody: what is left are the client, HTTP and the waiting."""
    message = {"role": "assistant", "content": string.ascii_lowercase[:SHORT]}
    body = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(ENGINE_SECONDS)
        return web.json_response(body)

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def measured(side: str) -> MeasuredEndpoint:
    seconds = asyncio.run(added_by(side))
    rate = None if side == BARE else asyncio.run(rate_of(side))
    return MeasuredEndpoint(rate, seconds[len(seconds) // 2], seconds[int(0.95 * len(seconds))])


def show(sides: list[EndpointSide]) -> str:
    rows = []
    for side in sides:
        rate = "" if side.rate is None else side.rate.show(".3f")
        rows.append([side.name, rate, *(s.multiplied(1000).show(".2f") for s in (side.median, side.ninety_fifth))])
    header = ["", "share of the engine's rate", "added, median, ms", "added, 95th percentile, ms"]
    goal = (
        f"The goal: at least {GOAL_RATE:g} of {RATE:,.0f} tokens/s with {EPISODES} episodes open, and at most "
        f"{1000 * GOAL_SECONDS:g} ms added at the 95th percentile at {ASKING / PERIOD:.0f} requests a second."
    )
    return f"Median (smallest – largest) over repetitions in turn. {goal}\n\n{table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    machine = Hardware.here(packages=("openai", "aiohttp"))
    sides = {side: lambda _, side=side: measured(side) for side in (DIRECT, OVER_HTTP, BARE)}
    results = [EndpointSide.of(name, runs) for name, runs in interleaved(sides, arguments.repetitions).items()]
    write_results(arguments.results, "endpoint", machine, results, show(results))


if __name__ == "__main__":
    main()
