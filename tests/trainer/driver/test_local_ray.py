"""A private Ray: nobody reaches it from the network, it fights over no port and starts no process that nobody needs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
from listening import listening
from warm_workers import WITH_AGENT

from rljob_trainer.driver.local_ray import RayStartError, ray_for_run

USUAL_AGENT_PORT = 52365


def test_a_private_ray_is_frugal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(WITH_AGENT, "1")
    before = listening(os.getpid())
    with ray_for_run(cpus=1):

        @ray.remote
        class Worker:
            def answer(self) -> int:
                return 1

        assert ray.get(Worker.remote().answer.remote()) == 1
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        (written,) = session.glob("dashboard_agent_listen_port_*")
        assert int(written.read_text()) not in (0, USUAL_AGENT_PORT)
        assert "Failed to bind" not in (session / "logs" / "dashboard_agent.log").read_text()
        # Whoever reaches Ray may run what they like.
        assert {address for address, _ in listening(os.getpid()) - before} == {"127.0.0.1"}
        commands = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # what has ended, as when Ray was too slow and is started once more
                commands.append(" ".join(child.cmdline()))
        assert any("raylet" in command for command in commands)
        unneeded = ("monitor.py", "dashboard.py")
        assert not [command for command in commands if any(name in command for name in unneeded)]


@pytest.mark.parametrize(("is_wanted", "attempts"), [(True, 3), (False, 1)])
def test_a_start_that_fails_is_tried_again_only_while_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_wanted: bool, attempts: int
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    begun: list[int] = []

    def late(**_: object) -> None:
        begun.append(1)
        raise Exception("the current node timed out during startup")

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(RayStartError, match="timed out"), ray_for_run(1, lambda: is_wanted):
        pytest.fail("it has started")
    assert len(begun) == attempts
    assert len(caplog.messages) == (attempts if is_wanted else 0)
