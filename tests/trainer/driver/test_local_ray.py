"""A private Ray beside another one: no port of the machine is fought over."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from rljob_trainer.driver.local_ray import ray_for_run

USUAL_AGENT_PORT = 52365


def test_the_agent_takes_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ray_for_run(cpus=1):
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        (written,) = session.glob("dashboard_agent_listen_port_*")
        assert int(written.read_text()) not in (0, USUAL_AGENT_PORT)
        assert "Failed to bind" not in (session / "logs" / "dashboard_agent.log").read_text()
