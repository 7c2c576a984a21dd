"""Programs that a model writes, run by the tool for them, in whatever mode this machine has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from played_sandbox import playing_sandbox
from published_chats import FAMILIES, chat_of
from tiny_job import copy_job

from rljob_api import load_jobs
from rljob_api.resolution import resolve
from rljob_trainer.environments import environment_of
from rljob_trainer.environments.tools import PythonPrograms, Tool, ToolError
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.errors import JobFileError, WorldFailedError
from rljob_trainer.world.sandbox import LocalSandbox, SandboxLimits, chosen, mode_available


@pytest.fixture
async def tool() -> AsyncIterator[Tool]:
    mode = next((mode for mode in ("landlock", "namespaces") if mode_available(mode) is None), "none")  # type: ignore[arg-type]
    async with LocalSandbox(mode, SandboxLimits(wall_seconds=3), workers=1) as sandbox:  # type: ignore[arg-type]
        yield Tool("python", PythonPrograms(sandbox).run, None, "a field", own_limit=True)


async def test_a_model_reads_what_its_program_prints_or_why_it_did_not(tool: Tool) -> None:
    assert await tool({"code": "print(sum(range(10)))"}) == "45\n"
    assert tool.first == "code"
    for code, told in [
        ("print('half')\n1 / 0", r"^exit code 1\nhalf\n(.*\n)*ZeroDivisionError: division by zero$"),
        ("import sys; sys.exit(3)", r"^exit code 3$"),
        ("import time; time.sleep(100)", r"^timed out$"),
        ("print('x' * 10**6)", r"^too much output\nx+$"),
        ("x = '" + "y" * (40 << 20) + "'", r"exceed the sandbox's limits"),
    ]:
        with pytest.raises(ToolError, match=told):
            await tool({"code": code})
    assert await tool({"code": "print(2)"}) == "2\n", "the next program runs"


def spec_of(tools: list[dict[str, Any]], **more: Any) -> Any:
    document = copy_job(
        rollout={"engine": "torch", "maxResponseTokens": 4, "environment": {"type": "tools", "tools": tools, **more}}
    )
    document["spec"]["model"]["chatTemplate"] = "{{ messages }}"
    (job,) = load_jobs(yaml.safe_dump(document))
    return resolve(job).spec


async def test_where_nothing_holds_programs_the_job_is_refused_unless_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "mode_available", lambda mode: f"no {mode} in this kernel")
    said: list[str] = []
    chat = chat_of(FAMILIES[0])
    python = [{"type": "python"}]
    async with AsyncExitStack() as stack:
        with pytest.raises(
            JobFileError, match=r"namespaces: no namespaces in .*; landlock: no landlock .* isolation: none"
        ):
            await environment_of(spec_of(python), chat, tmp_path / "a", tmp_path, stack, said.append)
        allowed = spec_of(python, sandbox={"isolation": "none"})
        made = await environment_of(allowed, chat, tmp_path / "b", tmp_path, stack, said.append)
        assert isinstance(made, Programs)
        made.close()


async def test_what_a_job_says_of_its_sandbox_is_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, SandboxLimits, int]] = []

    class Noted(LocalSandbox):
        def __init__(self, mode: Any, limits: SandboxLimits, workers: int, *others: Any) -> None:
            made.append((mode, limits, workers))
            super().__init__(mode, limits, workers, *others)

    monkeypatch.setattr(chosen, "LocalSandbox", Noted)
    spec = spec_of(
        [{"type": "python"}],
        callSeconds=7,
        sandbox={"isolation": "none", "workers": 1, "memoryMegabytes": 64, "processes": 3},
    )
    async with AsyncExitStack() as stack:
        environment = await environment_of(spec, chat_of(FAMILIES[0]), tmp_path / "log", tmp_path, stack, print)
        environment.close()
    limits = SandboxLimits(wall_seconds=7, cpu_seconds=7, memory_bytes=64 << 20, processes=3)
    assert made == [("none", limits, 1)]


async def test_a_job_that_names_a_service_has_its_programs_run_there(tmp_path: Path) -> None:
    async with playing_sandbox() as played, AsyncExitStack() as stack:
        spec = spec_of([{"type": "python"}], callSeconds=3, sandbox={"url": played.url, "workers": 100})
        environment = await environment_of(spec, chat_of(FAMILIES[0]), tmp_path / "log", tmp_path, stack, print)
        environment.close()
    assert [asked.run_timeout for asked in played.asked] == [3]
    async with AsyncExitStack() as stack:
        spec = spec_of([{"type": "python"}], sandbox={"url": played.url, "deadlineSeconds": 1})
        with pytest.raises(WorldFailedError, match=r"cannot open .*environment\.sandbox: the sandbox at http"):
            await environment_of(spec, chat_of(FAMILIES[0]), tmp_path / "late", tmp_path, stack, print)
