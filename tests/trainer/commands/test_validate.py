"""`rljob validate`: what it prints, how it ends, and what it must not import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_trainer.cli import main

Edit = Callable[[str, str], Path]
EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_valid_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "job.yaml"]) == 0
    assert capsys.readouterr().out == "job.yaml: valid\n"


def test_every_violation_is_a_line(edited: Edit, capsys: pytest.CaptureFixture[str]) -> None:
    edited("preset: grpo", "preset: grpo, critic: {valueClip: -1}")
    edited("name: tiny", "name: Tiny")
    assert main(["validate", "job.yaml"]) == 64
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        'metadata.name: "Tiny" does not have the right form; '
        "use lower-case letters, digits and '-', with a letter or digit at both ends",
        "spec.algorithm.critic.valueClip: -1 is too small; must be 0 to 1000000",
    ]
    assert captured.err == ""


def test_files_are_looked_at_also_when_rules_are_broken(edited: Edit, capsys: pytest.CaptureFixture[str]) -> None:
    edited("train.jsonl", "trian.jsonl")
    edited("{type: gsm8k}", "{type: pattern}, {type: custom, function: 'absent_rewards:score'}")
    edited("preset: grpo", "preset: grpo, critic: {learningRate: 1.0e-5}")
    assert paths(capsys) == [
        "spec.reward.functions[0].pattern",
        "spec.algorithm.critic",
        "spec.data.train.source",
        "spec.reward.functions[1].function",
    ]


def test_files_are_looked_at_also_when_types_are_wrong(edited: Edit, capsys: pytest.CaptureFixture[str]) -> None:
    edited("name: tiny", "name: Tiny")
    edited("maxResponseTokens: 156", "maxResponseTokens: 157, replicas: two")
    edited("answer: answer", "answer: anwser")
    assert paths(capsys) == [
        "metadata.name",
        "spec.rollout.replicas",
        "spec.rollout.maxResponseTokens",
        "spec.data.answer",
    ]


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        # Its default of 1024 would be too much for the model.
        ("maxPromptTokens: 100", "maxPromptTokens: '100'", "spec.data.maxPromptTokens"),
        ("maxPromptTokens: 100", "maxPromtTokens: 100", "spec.data.maxPromtTokens"),
        ("maxResponseTokens: 156", "maxResponseTokens: x", "spec.rollout.maxResponseTokens"),
        # Its default of `question` is a column that the last row lacks.
        (
            "{source: train.jsonl}\n    prompt: question",
            "{source: other.jsonl}\n    prompt: [text]",
            "spec.data.prompt",
        ),
        ("{source: train.jsonl}", "{source: [x]}", "spec.data.train.source"),
        ("{source: train.jsonl}", "nothing", "spec.data.train"),
        # The first row has all columns, the last one has not.
        ("{source: train.jsonl}", "{source: ragged.jsonl, limit: '1'}", "spec.data.train.limit"),
        ("{source: train.jsonl}", "{source: ., split: [ragged]}", "spec.data.train.split"),
        ("{type: gsm8k}", "{type: gsm8k, params: {a: 1}, weight: x}", "spec.reward.functions[0].weight"),
        ("{source: ./model}", "5", "spec.model"),
        ("{type: gsm8k}", "{type: none}", "spec.reward.functions[0].type"),
        ("prompt: question", "prompt: '{question'", "spec.data.prompt"),
        ("{source: train.jsonl}", "{task: {type: copy, digits: 1, size: 11}}", "spec.data.train.task.size"),
    ],
)
def test_what_follows_from_a_mistake_is_not_said_too(
    edited: Edit, folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, path: str
) -> None:
    (folder / "ragged.jsonl").write_text('{"question": "a", "answer": "b"}\n{"question": "a"}\n')
    (folder / "other.jsonl").write_text('{"question": "a", "answer": "b", "text": "c"}\n{"answer": "b"}\n')
    edited(old, new)
    assert paths(capsys) == [path]


def test_a_file_that_is_not_there_is_named_whatever_else_is_wrong_with_its_part(
    edited: Edit, capsys: pytest.CaptureFixture[str]
) -> None:
    edited("{source: train.jsonl}", "{source: nowhere.jsonl, limit: '1'}")
    assert paths(capsys) == ["spec.data.train.limit", "spec.data.train.source"]


def test_code_that_can_not_be_read_may_hold_the_reward(edited: Edit, capsys: pytest.CaptureFixture[str]) -> None:
    edited("{type: gsm8k}", "{type: custom, function: 'absent_rewards:score'}")
    edited("  rollout:", "  code: here\n  rollout:")
    assert paths(capsys) == ["spec.code"]


def paths(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The paths that are blamed in the job file, in the order in which they are printed."""
    assert main(["validate", "job.yaml"]) == 64
    captured = capsys.readouterr()
    assert captured.err == ""
    return [line.split(": ")[0] for line in captured.out.splitlines()]


def test_several_files_are_one_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for run, plan, eval and render."""
    (folder / "longer.yaml").write_text("spec:\n  stop: {steps: 900}\n")
    (folder / "wrong.yaml").write_text("spec:\n  algorithm: {preset: gro}\n")
    assert main(["validate", "job.yaml", "longer.yaml"]) == 0
    assert main(["validate", "job.yaml", "longer.yaml", "wrong.yaml"]) == 64
    assert main(["validate", "job.yaml", "absent.yaml"]) == 64
    valid, wrong, absent = capsys.readouterr().out.splitlines()
    assert valid == "job.yaml + longer.yaml: valid"
    assert wrong.startswith("spec.algorithm.preset: ")
    assert absent == "absent.yaml: cannot be read (No such file or directory); check the path"


@pytest.mark.parametrize(
    "verb", [["validate"], ["run"], ["eval"], ["plan", "--generation=1", "--training=1"], ["render"]], ids=" ".join
)
def test_a_whole_job_is_not_laid_over_another(
    folder: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    """What a shell makes of `jobs/*.yaml`."""
    (folder / "other.yaml").write_text((folder / "job.yaml").read_text())
    assert main([*verb, "job.yaml", "other.yaml"]) == 64
    captured = capsys.readouterr()
    assert (
        "other.yaml, line 2: is an object of its own, and every file after the first is laid over the job in that; "
        "give each job to a call of its own, or leave apiVersion and kind out of an overlay\n"
    ) in captured.out + captured.err


def test_several_jobs_of_one_file_are_told_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = (folder / "job.yaml").read_text()
    (folder / "both.yaml").write_text("---\n".join([good, good.replace("preset: grpo", "preset: gro")]))
    assert main(["validate", "both.yaml"]) == 64
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"both.yaml:{good.count(chr(10)) + 14}: spec.algorithm.preset: ")


def test_a_file_that_is_no_job_is_named_also_when_it_is_the_only_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.yaml").write_text("a: [\n")
    (folder / "other.yaml").write_text("apiVersion: v1\nkind: ConfigMap\n")
    assert main(["validate", "broken.yaml"]) == 64
    assert main(["validate", "other.yaml"]) == 64
    with (folder / "broken.yaml").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["validate", "-"]) == 64
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "broken.yaml, line 2, column 1",
        "other.yaml",
        "standard input, line 2, column 1",
    ]
    assert main(["eval", "broken.yaml"]) == 64
    assert "broken.yaml, line 2, column 1: " in capsys.readouterr().err


def test_assignments_are_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "job.yaml", "--set", "stop.steps=5", "--quiet"]) == 0
    assert main(["validate", "job.yaml", "--set", "stop.steps=0"]) == 64
    assert capsys.readouterr().out == "spec.stop.steps: 0 is too small; must be 1 to 100000000\n"


def test_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "job.yaml").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["validate", "-"]) == 0


def test_schema_only_looks_at_no_files(folder: Path) -> None:
    (folder / "train.jsonl").unlink()
    assert main(["validate", "job.yaml"]) == 64
    assert main(["validate", "job.yaml", "--schema-only"]) == 0


def test_relative_paths_start_at_the_job_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert main(["validate", str(folder / "job.yaml")]) == 0


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid(example: Path) -> None:
    assert main(["validate", str(example)]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "job.yaml"],
        ["validate", "job.yaml", "--set", "model.source=owner/name"],
        ["explain", "-r"],
        ["--help"],
        ["--version"],
    ],
)
def test_nothing_slow_is_imported(folder: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from rljob_trainer.cli import main; code = main(sys.argv[1:]); "
        "slow = {'torch', 'ray', 'transformers', 'vllm', 'datasets', 'pyarrow', 'math_verify'} & set(sys.modules); "
        "assert not slow, slow; sys.exit(code)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr


def test_the_installed_command_ends_with_the_code_and_without_a_traceback(edited: Edit) -> None:
    file = edited("preset: grpo", "preset: nothing")
    process = subprocess.run(
        [Path(sys.executable).parent / "rljob", "validate", file],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert process.returncode == 64
    assert "Traceback" not in process.stdout + process.stderr
    assert process.stdout.startswith("spec.algorithm.preset: ")
