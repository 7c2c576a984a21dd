"""Who is named when Ray itself ends under a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import RayActorError
from warm_workers import WITH_AGENT

from rljob_trainer.control.signals import listening
from rljob_trainer.driver.ray_beside import RayLostError, ray_beside
from rljob_trainer.errors import LearnerError


def is_an_agent(process: psutil.Process) -> bool:
    try:
        return "DashboardAgent" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


def is_heard(number: signal.Signals) -> bool:
    """Whether this process has a handler for it, by what the kernel says."""
    (handled,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(handled, 16) >> (number - 1) & 1)


async def run_whose_agent_is_killed(listen: Callable[[], None]) -> None:
    async with ray_beside(1, listen):

        @ray.remote(num_cpus=0)
        class Rank:
            def wait(self) -> None:
                signal.pause()

        waiting = Rank.remote().wait.remote()  # type: ignore[attr-defined]
        (agent,) = filter(is_an_agent, psutil.Process(os.getpid()).children(recursive=True))
        agent.kill()
        try:
            await waiting
        except RayActorError as error:
            raise LearnerError("learner rank 0 died") from error


async def test_a_raylet_that_ends_with_its_agent_is_named_and_not_the_rank_that_it_takes_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And signals are heard afterwards, when the run's last files are written."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(WITH_AGENT, "1")
    named = r"Ray's raylet \(process \d+\) .*, because its agent \(ray::DashboardAgent\) exited: without it "
    with listening() as stop:
        with pytest.raises(RayLostError, match=named):
            await run_whose_agent_is_killed(stop.listen)
        assert is_heard(signal.SIGTERM)
