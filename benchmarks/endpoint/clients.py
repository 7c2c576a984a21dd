"""Agents in one process, with OpenAI's client: ``python -m benchmarks.endpoint.clients TURNS SECONDS``.

Reads a line of JSON for each agent (``base_url``, ``api_key``, ``offset``) and starts it; writes one when it has ended:
its key, and how long each of its ``TURNS`` requests took. An agent asks at ``offset`` and every ``SECONDS`` from then
on, or again at once where that is 0.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from openai import APIStatusError, AsyncOpenAI

QUESTION = {"role": "user", "content": "which of these is the larger number and why do you think so " * 4}


async def main(turns: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.StreamReader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    api = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1", timeout=600)
    running = set()
    while line := await lines.readline():
        given = json.loads(line)
        running.add(task := asyncio.create_task(agent(api, given, turns, seconds)))
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)


async def agent(api: AsyncOpenAI, given: dict[str, Any], turns: int, seconds: float) -> None:
    policy = api.with_options(base_url=given["base_url"], api_key=given["api_key"])
    messages: list[Any] = [QUESTION]
    took = []
    await asyncio.sleep(given["offset"])
    begun = time.perf_counter()
    for turn in range(turns):
        await asyncio.sleep(max(0.0, begun + turn * seconds - time.perf_counter()))
        asked = time.perf_counter()
        try:
            completion = await policy.chat.completions.create(model="policy", messages=messages)
        except APIStatusError:
            return  # the measurement is over, and its episodes are given up
        took.append(time.perf_counter() - asked)
        messages += [completion.choices[0].message, {"role": "user", "content": "and now"}]
    print(json.dumps({"api_key": given["api_key"], "seconds": took}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
