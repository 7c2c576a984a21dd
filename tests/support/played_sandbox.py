"""A service with SandboxFusion's interface that is played: it runs programs as they are, in a folder that goes away.

Requests and answers have the fields of the published page (https://bytedance.github.io/SandboxFusion/docs/api/
run-code-run-code-post) and ``memory_limit_MB`` of later servers, and no others. As the real one it gives at most 1 MiB
of what a program writes, and a text of its own where that is no UTF-8. It contains nothing.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from aiohttp import web
from loopback_site import on_loopback
from pydantic import BaseModel, ConfigDict, Field

MOST_GIVEN = 2**20


class RunCodeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    code: str
    language: Literal["python"]
    compile_timeout: float = 10
    run_timeout: float = 10
    memory_megabytes: int = Field(default=-1, alias="memory_limit_MB")
    stdin: str | None = None
    files: dict[str, str] = {}
    fetch_files: list[str] = []


class CommandRunResult(BaseModel):
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}

    def sent(self) -> web.Response:
        return web.Response(text=self.model_dump_json(), content_type="application/json")


Answer = Callable[[RunCodeRequest, int], Awaitable[web.StreamResponse]]
"""What is said to a request, which is the so-manyeth (from 0)."""


class PlayedSandbox:
    """What it was asked, and where."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[RunCodeRequest] = []
        self.running = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def given(written: bytes) -> str:
    try:
        return written[:MOST_GIVEN].decode()
    except UnicodeDecodeError as error:
        return f"[DecodeError] {error}"


async def running(request: RunCodeRequest, number: int = 0) -> web.StreamResponse:
    """Runs the program."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in request.files.items():
            place = Path(folder) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(base64.b64decode(content))
        program = Path(folder) / "main.py"
        program.write_text(request.code)
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", program, cwd=folder, stdin=-1, stdout=-1, stderr=-1
        )
        try:
            said = await asyncio.wait_for(process.communicate((request.stdin or "").encode()), request.run_timeout)
        except TimeoutError:
            return RunCodeResponse(
                status="Failed", run_result=CommandRunResult(status="TimeLimitExceeded", execution_time=1.0)
            ).sent()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        stdout, stderr = map(given, said)
        ran = CommandRunResult(
            status="Finished",
            execution_time=time.monotonic() - began,
            return_code=process.returncode,
            stdout=stdout,
            stderr=stderr,
        )
        return RunCodeResponse(status="Failed" if process.returncode else "Success", run_result=ran).sent()


async def failing(request: RunCodeRequest, number: int = 0) -> web.StreamResponse:
    return RunCodeResponse(status="SandboxError", message="no space left on device").sent()


@asynccontextmanager
async def playing_sandbox(answer: Answer = running, port: int = 0) -> AsyncIterator[PlayedSandbox]:
    """A service that answers as ``answer`` says; port 0: one that is free."""
    sandbox = PlayedSandbox(port)

    async def handle(request: web.Request) -> web.StreamResponse:
        body = RunCodeRequest.model_validate_json(await request.read())
        sandbox.asked.append(body)
        sandbox.running += 1
        sandbox.most_at_once = max(sandbox.most_at_once, sandbox.running)
        try:
            return await answer(body, len(sandbox.asked) - 1)
        finally:
            sandbox.running -= 1

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/run_code", handle)
    async with on_loopback(app, port) as sandbox.port:
        yield sandbox
