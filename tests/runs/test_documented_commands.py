"""The commands of README, docs and examples, typed one after the other as they stand there.

Each chain has a copy of what a checkout holds, with the environment of this one already made. Its quick start, and what
a page takes for the reader's own jobs, are the quick start with a few small steps. What no chain types, and why, is
listed in tests/support/documented.yaml.

The program is the installed one; where it trains or loads a model it is forked from a process that has imported what
that takes (``warm``), and in an interpreter of its own everywhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from documented import ROOT, table, typed
from warm import Warm

from rljob_api.overrides import merged

CHAINS, LISTED = table()
SECONDS = 500
SMALL = {
    "data": {"validation": [{"name": "held-out", "task": {"type": "addition", "digits": 2}, "limit": 8}]},
    "batch": {"groups": 16, "miniBatchGroups": 4},
    "logging": {"samplesEvery": 2},
    "checkpoint": {"everySteps": 2},
    "stop": {"steps": 5},
}


INSTALLED = Path(sys.executable).with_name("rljob")
ASKS = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect({address!r})
    order = {{"arguments": sys.argv[1:], "env": {{**os.environ}}, "cwd": os.getcwd()}}
    socket.send_fds(asked, [json.dumps(order).encode()], [1])
    sys.exit(json.loads(asked.recv(64)))
"""
"""What stands for the installed program where that would import for ten seconds: it asks ``Forks`` for it."""


class Forks:
    """Runs the installed program for whoever asks at ``address``, forked, one after the other."""

    def __init__(self, folder: Path, warm: Warm) -> None:
        self.address, self._warm, self._printed = str(folder / "asked"), warm, folder / "printed"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(self.address)
        self._listening.listen()
        self._serving = threading.Thread(target=self._serve)
        self._serving.start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._serving.join()
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                asked, _ = self._listening.accept()
            except OSError:  # it is closed
                return
            with asked:
                text, (out,), _, _ = socket.recv_fds(asked, 1 << 20, 1)
                order = json.loads(text)
                program = self._warm.start(
                    [str(INSTALLED)], order["arguments"], self._printed, env=order["env"], cwd=Path(order["cwd"])
                )
                # Nobody waits longer than for a command; a process that is left then would block the tests' end.
                try:
                    code = program.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    program.kill()
                    code = program.wait()
                with open(out, "wb") as file:
                    file.write(self._printed.read_bytes())
                with contextlib.suppress(BrokenPipeError):
                    asked.send(json.dumps(code).encode())


class Checkout:
    """A copy of the tree in which `make` finds its environment made, and a home in which nothing is yet."""

    def __init__(self, folder: Path, forks: str) -> None:
        """``forks``: where ``Forks`` are asked."""
        self.folder, self._home, self._printed = folder / "checkout", folder / "home", folder / "printed"
        self._home.mkdir()
        for name in ("examples", "requirements"):
            shutil.copytree(ROOT / name, self.folder / name)
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder)
        # Nothing but the command itself: a set-up that wanted to mend this environment could not reach the real one.
        environment = self.folder / ".venv"
        (environment / "bin").mkdir(parents=True)
        asks, rljob = folder / "asks.py", environment / "bin" / "rljob"
        asks.write_text(ASKS.format(address=forks))
        asks_or_is = (
            f'case "$1" in run|eval|export) exec {sys.executable} -SE {asks} "$@";; *) exec {INSTALLED} "$@";; esac'
        )
        rljob.write_text(f"#!/bin/sh\n{asks_or_is}\n")
        rljob.chmod(0o755)
        made_from = "import install; print(install.fingerprint('cpu'), end='')"
        stamp = subprocess.run(
            [sys.executable, "-c", made_from], cwd=self.folder / "requirements", check=True, capture_output=True
        )
        (environment / "rljob-installed").write_bytes(stamp.stdout)
        example = self.folder / "examples" / "quickstart.yaml"
        job = merged(yaml.safe_load(example.read_text()), {"spec": SMALL})
        example.write_text(yaml.safe_dump(job))
        for name in ("my-job", "job", "base"):
            # On this machine a claim means nothing; in pods a random model needs a place.
            own = merged(job, {"metadata": {"name": name}, "spec": {"checkpoint": {"uri": "pvc://results/runs"}}})
            (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(own))
        (self.folder / "overlay.yaml").write_text("spec: {stop: {steps: 1}}\n")

    def type(self, command: str, folder: str) -> str:
        """Runs a command as a shell does and returns what it printed; one that fails fails the test."""
        path = f"{self.folder / '.venv' / 'bin'}:{os.environ['PATH']}"
        given = {"HOME": str(self._home), "PATH": path, "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
        with self._printed.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder / folder,
                env={**os.environ, **given, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(SECONDS)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        printed = self._printed.read_text()
        assert code == 0, f"{command}: exit code {code}\n{printed}"
        return printed


def makes_a_report_and_no_environment(checkout: Path, printed: str) -> None:
    assert (checkout / "runs/quickstart/report.html").exists()
    assert "rljob set-up" not in printed


def says_that_it_is_valid(checkout: Path, printed: str) -> None:
    assert printed == "my-job.yaml: valid\n"


def leaves_what_readme_says(checkout: Path, printed: str) -> None:
    (said,) = re.findall(r"The output folder holds (.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    output = checkout / "runs/mine"
    files = [name for name in re.findall(r"`([\w.-]+\.(?:jsonl|json|html))`", said) if not name.startswith("step-")]
    assert files == ["metrics.jsonl", "summary.json", "report.html"]
    assert [name for name in files if not (output / name).is_file()] == []
    # Self-contained: a browser without a network shows it.
    report = (output / "report.html").read_text()
    assert not re.search(r"(?:src|href)=[\"']?(?!#|data:)|@import|url\((?!#|data:)", report)
    assert [*(output / "tensorboard").glob("events.out.tfevents.*")]
    assert [*(output / "checkpoints").glob("step-*")]
    # From before the first step, every second one as the job says, and the last.
    samples = {int(re.sub(r"\D", "", path.stem)) for path in (output / "samples").glob("step-*.jsonl")}
    assert samples == {0, 2, 4, 5}
    assert "samples/step-000000.jsonl" in [str(path.relative_to(output)) for path in (output / "samples").iterdir()]
    assert json.loads((output / "summary.json").read_text())["outcome"] == "succeeded"


def trains_the_first_20_steps_changed(checkout: Path, printed: str) -> None:
    lines = [json.loads(line) for line in (checkout / "runs/try/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(21)]
    assert lines[1]["actor/learning_rate"] == pytest.approx(1e-6)


def trains_one_step_as_the_overlay_says(checkout: Path, printed: str) -> None:
    assert "1 of 1 steps are done" in printed


def shows_this_and_other_splits(checkout: Path, printed: str) -> None:
    assert all(word in printed for word in ("step s", "trainer idle", "engines idle", "age"))
    assert re.search(r"^job +sync +1 colocated ", printed, re.MULTILINE)


def shows_lockstep_and_other_splits(checkout: Path, printed: str) -> None:
    assert re.search(r"^job +fullyAsync +64:64 ", printed, re.MULTILINE)
    assert re.search(r"^ +sync +128 colocated ", printed, re.MULTILINE)
    assert not re.search(r"-\d+%", printed), "a share of the time is never negative"
    # The fastest of them may be marked.
    assert len(re.findall(r"^(?:best)? +fullyAsync +\d+:\d+ ", printed, re.MULTILINE)) > 1


def says_where_the_time_went(checkout: Path, printed: str) -> None:
    assert re.search(r"^the run has ended: succeeded", printed, re.MULTILINE)
    assert re.search(r"^last 10 minutes: .*\d %", printed, re.MULTILINE)


def scores_the_held_out_prompts(checkout: Path, printed: str) -> None:
    assert "held-out" in printed


def writes_a_folder_for_transformers(checkout: Path, printed: str) -> None:
    names = {path.name for path in (checkout / "my-model").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}


def prints_kubernetes_objects(checkout: Path, printed: str) -> None:
    objects = "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("note: "))
    kinds = [document["kind"] for document in yaml.safe_load_all(objects) if document]
    assert "RayCluster" in kinds


def explains(checkout: Path, printed: str) -> None:
    assert "Default: " in printed


CLAIMS: dict[str, Callable[[Path, str], None]] = {
    "make quickstart": makes_a_report_and_no_environment,
    ".venv/bin/rljob validate my-job.yaml": says_that_it_is_valid,
    ".venv/bin/rljob explain algorithm": explains,
    ".venv/bin/rljob run my-job.yaml --output runs/mine": leaves_what_readme_says,
    ".venv/bin/rljob run my-job.yaml --output runs/try --set trainer.optimizer.learningRate=1e-6 --steps 20": (
        trains_the_first_20_steps_changed
    ),
    ".venv/bin/rljob run base.yaml overlay.yaml": trains_one_step_as_the_overlay_says,
    ".venv/bin/rljob plan my-job.yaml --measured runs/mine": shows_this_and_other_splits,
    ".venv/bin/rljob status runs/mine": says_where_the_time_went,
    ".venv/bin/rljob eval my-job.yaml --run runs/mine": scores_the_held_out_prompts,
    ".venv/bin/rljob export runs/mine --to my-model": writes_a_folder_for_transformers,
    ".venv/bin/rljob render my-job.yaml": prints_kubernetes_objects,
    "rljob plan job.yaml --measured runs/measure": shows_this_and_other_splits,
    "rljob plan base.yaml 64-64.yaml --generation 225 --training 113": shows_lockstep_and_other_splits,
    "rljob render examples/gsm8k.yaml examples/overlays/bucket.yaml": prints_kubernetes_objects,
}
"""What a page says that a command does, or what it leaves, beside ending well."""


@pytest.fixture
def forks(warm: Warm) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rljob-", dir="/tmp") as folder:
        asked = Forks(Path(folder), warm)
        try:
            yield asked.address
        finally:
            asked.close()


def test_every_claim_is_about_a_command_of_a_chain() -> None:
    shown = {command.text for chain in CHAINS.values() for command in typed(chain, LISTED)}
    assert CLAIMS.keys() - shown == set()


@pytest.mark.slow(stands_for="[README]")
@pytest.mark.parametrize("name", CHAINS)
def test_the_pages_commands_work_in_their_order(name: str, tmp_path: Path, forks: str) -> None:
    chain, checkout = CHAINS[name], Checkout(tmp_path, forks)
    for command in typed(chain, LISTED):
        printed = checkout.type(chain.as_typed(command.text), chain.folder)
        if command.text in CLAIMS:
            CLAIMS[command.text](checkout.folder, printed)
