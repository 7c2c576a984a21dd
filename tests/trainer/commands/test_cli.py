"""The command line itself: verbs, help, and how errors end."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import types
from importlib.metadata import requires, version
from pathlib import Path

import pytest

from rljob_api import JobInvalid, Violation
from rljob_trainer import cli
from rljob_trainer.errors import DataError, DeadlineError, JobFileError

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A verb called ``probe`` whose ``run`` the test replaces."""
    module = types.ModuleType("rljob_probe_verb", "Probes.\n\nMore about probing.")
    module.add_arguments = lambda parser: parser.add_argument("--level", type=int, default=0)  # type: ignore[attr-defined]
    module.run = lambda args: args.level  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.VERBS, "probe", (module.__name__, "probe"))
    return module


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, summary) in cli.VERBS.items():
        assert name in text
        assert summary in text
    assert "render    print the Kubernetes objects that the operator would create for a job\n" in text


def test_no_verb_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: rljob VERB" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rljob {version('rljob')}\n"


def test_unknown_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vaildate"]) == 2
    assert "unknown verb 'vaildate'; did you mean validate?" in capsys.readouterr().err


def test_arguments_and_exit_code(verb: types.ModuleType) -> None:
    assert cli.main(["probe", "--level", "7"]) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--status-port", "99999"], "--status-port 99999 is not a port; use 0 (any free port) to 65535"),
        (["--token-file", "token"], "--token-file has no effect without --status-port; add it, or remove --token-file"),
        (["--resume", ""], "--resume is empty; pass auto, never, or the path of a checkpoint or a run"),
        (["--steps", "0"], "--steps 0 is too small; use 1 or more"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "job.yaml", *options]) == 64
    assert capsys.readouterr().err == f"rljob run: {message}\n"


def test_an_export_onto_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").write_text("mine")
    assert cli.main(["export", str(tmp_path), "--to", str(tmp_path / "model")]) == 1
    assert capsys.readouterr().err == f"rljob export: {tmp_path / 'model'} is a file; pass a new folder with --to\n"
    assert (tmp_path / "model").read_text() == "mine"


def test_help_of_a_verb(verb: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["probe", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "usage: rljob probe [-h] [--level LEVEL]" in text
    assert "Probes." in text
    assert "More about probing." in text


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (JobFileError("spec.x: wrong; mend it"), 64, "rljob probe: spec.x: wrong; mend it\n"),
        (DataError("line 3 is cut"), 65, "rljob probe: line 3 is cut\n"),
        (DeadlineError("engine 3 did not answer"), 75, "rljob probe: engine 3 did not answer\n"),
        (JobInvalid([Violation("a", "b", "c")]), 64, "rljob probe: the job file is invalid:\na: b; c\n"),
        (KeyboardInterrupt(), 130, "rljob probe: interrupted\n"),
    ],
)
def test_errors_end_with_a_message_and_their_code(
    verb: types.ModuleType, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    verb.run = fail  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == code
    assert capsys.readouterr().err == message


def test_a_bug_shows_its_traceback(verb: types.ModuleType) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    verb.run = fail  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{Path(sys.executable).parent / 'rljob'} explain -r | head -1"
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert process.stderr == ""
    assert process.stdout.count("\n") == 1


@pytest.mark.parametrize("name", ["validate", "explain"])
def test_verbs_have_a_first_line(name: str) -> None:
    module = importlib.import_module(cli.VERBS[name][0])
    assert (module.__doc__ or "").splitlines()[0].endswith(".")


FIRST_LINES = """
import os, sys
from types import SimpleNamespace

class Said(BaseException):
    pass

class First:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        if text.strip():
            slow = {{"torch", "ray", "transformers", "vllm"}} & set(sys.modules)
            os.write(1, f"{{sorted(slow)}} {{text.splitlines()[0]}}\\n".encode())
            raise Said
        return len(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)

sys.stdout, sys.stderr = First(sys.stdout), First(sys.stderr)
from rljob_trainer.driver import finished
found = SimpleNamespace(checkpoint=SimpleNamespace(step=3), lora=None)
finished.find_trained = lambda *args, **kwargs: found
from rljob_trainer.cli import main
for arguments in {commands!r}:
    try:
        main(arguments.split())
    except Said:
        pass
"""


def test_every_command_says_something_before_it_imports_what_takes_seconds(tmp_path: Path) -> None:
    """In one process, since a command that imports something spoils it for those after it too."""
    (tmp_path / "job.yaml").write_text((EXAMPLES / "quickstart.yaml").read_text())
    first = {
        "explain reward.functions.type": "KIND:     RLJob",
        "validate job.yaml": "job.yaml: valid",
        "render job.yaml --set checkpoint.uri=pvc://results/runs": "apiVersion: v1",
        "status run": "rljob status: run/status.json cannot be read",
        "plan job.yaml --generation 1 --training 1 --steps 4": "responses: exponential",
        "plan job.yaml --memory --gpu-memory 80Gi": "the random model: ",
        "run job.yaml --output out": "quickstart: valid; loading PyTorch and Ray",
        "eval job.yaml": "quickstart: validation on held-out; loading PyTorch and Ray",
        "export run --to out": "step 3 of run; loading PyTorch",
        "drive job.yaml --attempt 1 --generation 1 --token-file token": "attempt 1: loading PyTorch and Ray",
    }
    assert {command.split()[0] for command in first} == {*cli.VERBS, "render"}
    code = FIRST_LINES.format(commands=list(first))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    said = ran.stdout.splitlines()
    assert len(said) == len(first), ran.stderr
    for line, expected in zip(said, first.values(), strict=True):
        assert line.startswith(f"[] {expected}")


BASE_ONLY = """
import sys

# What the extras bring; pydantic and PyYAML stay.
OTHERS = {others!r}

class OnlyBase:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, OnlyBase())
from rljob_trainer.cli import main
for arguments in {commands!r}:
    print(">", arguments[0], main(arguments), flush=True)
"""


def test_the_base_wheel_says_which_extra_a_verb_needs(tmp_path: Path) -> None:
    """In a process in which nothing can be imported that `pip install rljob` alone does not bring."""
    others = set().union(*cli.EXTRAS.values()) | {"kubernetes", "requests"}
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    (tmp_path / "train.jsonl").write_text('{"question": "1", "answer": "#### 1"}\n')
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    drive = ["--attempt", "1", "--generation", "1", "--token-file", "none"]
    commands = [
        ["explain", "algorithm"],
        ["validate", str(job), "--schema-only"],
        ["render", str(job)],
        ["status", str(run)],
        ["export", str(run), "--to", str(tmp_path / "out")],
        ["validate", str(job)],
        ["run", str(job)],
        ["eval", str(job)],
        ["plan", str(job), "--generation", "1", "--training", "1"],
        ["drive", str(job), *drive],
    ]
    code = BASE_ONLY.format(others=others, commands=commands)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 0
    ended = dict(line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("> "))
    codes = {"validate": "0", "explain": "0", "render": "0", "export": "66"}  # the run has no checkpoint
    assert ended == {verb: codes.get(verb, "1") for verb, *_ in commands}
    for verb in ("run", "eval", "plan", "drive"):
        assert f"rljob {verb}: the module " in ran.stderr
    assert ran.stderr.count("is not installed; install the extra trainer: pip install 'rljob[trainer,cpu]'") == 5


def test_without_the_trainer_job_files_are_validated_by_themselves(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    commands = [["validate", str(job)], ["validate", str(job), "--set", "batch.groups=0"]]
    code = BASE_ONLY.format(others=set().union(*cli.EXTRAS.values()), commands=commands)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    valid, first, wrong, second = ran.stdout.splitlines()
    assert (valid, first) == (f"{job}: valid by itself", "> validate 0")
    assert wrong.startswith("spec.batch.groups: ")
    assert second == "> validate 64"
    assert ran.stderr.count("files and data that the job refers to were not checked: the module ") == 2


def test_extras_bring_what_they_are_said_to_bring() -> None:
    """Module names of the extras' own requirements, where they are the distributions' names."""
    named = {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in requires("rljob") or ()}
    for modules in cli.EXTRAS.values():
        for module in modules - {"huggingface_hub", "tokenizers", "mlflow"}:
            assert {module, module.replace("_", "-")} & named, module


JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: tiny}
spec:
  model: {source: owner/name}
  data: {train: {source: ./train.jsonl}, answer: answer}
  reward: {functions: [{type: gsm8k}]}
  algorithm: {preset: grpo}
  stop: {steps: 1}
"""
