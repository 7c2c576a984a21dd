"""What the end-to-end suite gathers when a test fails, as far as it shows without a cluster: that it never raises, also
where nothing answers, and what it leaves out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
E2E = ROOT / "tests" / "e2e"
NOBODY = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "nobody", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "somebody", "user": {"token": "of no importance"}}],
    "contexts": [{"name": "nobody", "context": {"cluster": "nobody", "user": "somebody"}}],
    "current-context": "nobody",
}
"""A cluster whose API server is away: nothing listens there."""
SESSION = """
def test_first(world):
    pass

def test_second(world):
    pass
"""


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(E2E))
    import gathering

    return gathering


def test_a_session_without_an_api_server_says_what_it_failed_of_and_gathers_once(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(NOBODY))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_session.py").write_text(SESSION)
    logs = tmp_path / "logs"
    left = logs / "test_first" / "of an earlier session.txt"
    left.parent.mkdir(parents=True)
    left.touch()
    environment = os.environ | {
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "RLJOB_E2E_LOGS": str(logs),
        "PYTHONPATH": f"{E2E}:{ROOT / 'deploy'}",
    }
    # The suite's conftest.py itself.
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", "pytest.ini", "test_session.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "2 errors" in done.stdout
    assert f"everything the cluster says is in {logs / 'test_first'}" in done.stdout
    # Both failed of the session's namespace, which is told once.
    assert os.listdir(logs) == ["test_first"]
    assert not left.exists()
    problems = (logs / "test_first" / "not-gathered.txt").read_text()
    (namespace,) = (path.name for path in (logs / "test_first").iterdir() if path.name.startswith("rljob-e2e-"))
    for part in (f"results of {namespace}: ", f"pods_of_namespace of {namespace}: ", "system_pods of default: "):
        assert part in problems


def test_containers_that_were_started_again_are_those_with_a_life_before(gathering: object) -> None:
    pod = {
        "status": {
            "initContainerStatuses": [{"name": "waits", "restartCount": 2}],
            "containerStatuses": [{"name": "ray", "restartCount": 0}, {"name": "beside", "restartCount": 1}],
        }
    }
    assert gathering.restarted(pod) == ["waits", "beside"]  # type: ignore[attr-defined]
    assert gathering.restarted({"status": {"phase": "Pending"}}) == []  # type: ignore[attr-defined]


def test_manifests_are_kept_but_for_secrets(gathering: object) -> None:
    text = (ROOT / "tests" / "integration" / "snapshots" / "everything.yaml").read_text()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}, "data": {"key": "aHVzaA=="}}
    kept = gathering.without_secrets(f"{text}\n---\n{yaml.safe_dump(secret)}")  # type: ignore[attr-defined]
    assert "aHVzaA==" not in kept
    others = [document for document in yaml.safe_load_all(text) if document and document["kind"] != "Secret"]
    assert len(others) > 5
    assert [document for document in yaml.safe_load_all(kept) if document] == others
