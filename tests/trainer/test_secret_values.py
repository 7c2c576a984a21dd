"""What is secret is known by its value, whatever stands around it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.spec.pod import Pod
from rljob_api.status import DriverStatus
from rljob_trainer import secret_values
from rljob_trainer.control.standing import shown
from rljob_trainer.secret_values import know, masked
from rljob_trainer.telemetry.run_folder import SampleRow

VALUE = "wJalrXUtnFEMI/K7MDENG+bPxRfiCY"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(secret_values, "_known", set())
    monkeypatch.setattr(secret_values, "_pattern", None)
    monkeypatch.setattr(secret_values, "_looked", False)
    yield
    secret_values._looked = False


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "JUDGE_KEY",
        "HF_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "WANDB_API_KEY",
        "SENTRY_DSN",
        "db_passwd",
    ],
)
def test_a_variable_whose_name_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, VALUE)
    assert masked(f"403 for {VALUE}; tried {VALUE}") == "403 for ***; tried ***"
    assert masked(json.dumps({"said": f'"{VALUE}"'})) == '{"said": "\\"***\\""}'


@pytest.mark.parametrize("value", ['a "quoted" one\\here', "ümlaut&amp<tag>", "with space/and+more", "tab\there-it-is"])
def test_in_the_forms_in_which_text_is_written(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from html import escape
    from urllib.parse import quote, quote_plus

    monkeypatch.setenv("JUDGE_KEY", value)
    for text in (value, json.dumps(value), repr(value), quote(value, safe=""), escape(value)):
        assert "***" in masked(f"x{text}y")
        assert masked(f"x{text}y").strip("xy").strip("'\"") == "***", text
    assert quote_plus("a b") == "a+b"  # the only form of these that is not looked for


def test_what_is_no_secret_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RAY_AUTH_MODE": "token",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_TOKEN_RETRIES": "1234567890",
        "SHORT_KEY": "1234",
        "GIT_AUTHOR_NAME": "Somebody Somewhere",
        "SSH_AUTH_SOCK": "/tmp/ssh-agent/socket",
    }.items():
        monkeypatch.setenv(name, value)
    text = "token false 1234567890 1234 Somebody Somewhere /tmp/ssh-agent/socket"
    assert masked(text) == text


def test_a_password_within_an_address_and_the_file_that_a_variable_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "account.json").write_text(
        json.dumps({"private_key": f"-----BEGIN KEY-----\n{VALUE}\n", "type": "service_account"})
    )
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    monkeypatch.setenv("HTTPS_PROXY", "http://somebody:correct-horse@proxy:3128")
    text = f"proxy:3128 refused correct-horse; the service_account has {VALUE} in {tmp_path}"
    assert masked(text) == f"proxy:3128 refused ***; the service_account has *** in {tmp_path}"


def pod(**more: Any) -> Pod:
    return Pod.model_validate(more)


def test_what_a_job_takes_from_a_secret_whatever_its_name(tmp_path: Path) -> None:
    reference = {"secretKeyRef": {"name": "s", "key": "k"}}
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "cert").write_text(f"{VALUE}\n")
    (tmp_path / "one-file").write_text("by-sub-path-7\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config").write_text("a-word-of-some-length\n")
    known = pod(
        env=[{"name": "DATABASE", "valueFrom": reference}, {"name": "MODE", "value": "a-mode-of-ours"}],
        volumes=[{"name": "s", "secret": {"secretName": "s"}}, {"name": "c", "configMap": {"name": "c"}}],
        volumeMounts=[
            {"name": "s", "mountPath": str(tmp_path / "mounted")},
            {"name": "c", "mountPath": str(tmp_path / "other")},
            {"name": "s", "mountPath": str(tmp_path / "one-file"), "subPath": "one-file"},
        ],
        template={
            "spec": {
                "containers": [
                    {
                        "name": "ray",
                        "env": [
                            {"name": "QUEUE", "valueFrom": reference},
                            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                        ],
                        "envFrom": [{"secretRef": {"name": "whole"}}],
                    }
                ]
            }
        },
    )
    environment = {
        "DATABASE": "database-value",
        "MODE": "a-mode-of-ours",
        "QUEUE": "queue-value-1",
        "FROM_WHOLE": "whole-value-1",
        "POD": "a-name-of-a-pod",
        "AWS_REGION": "eu-central-1",
        "RAY_ADDRESS": "10.1.2.3:6379",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "PATH": "/usr/local/bin:/usr/bin",
    }
    know([known], environment)
    assert masked(f"database-value queue-value-1 whole-value-1 {VALUE} by-sub-path-7") == "*** *** *** *** ***"
    others = "a-name-of-a-pod eu-central-1 a-mode-of-ours 10.1.2.3:6379 10.96.0.1 /usr/local/bin:/usr/bin"
    assert masked(others) == others
    assert masked("a-word-of-some-length") == "a-word-of-some-length"


def test_without_a_whole_secret_other_variables_are_shown() -> None:
    know([pod()], {"FROM_IMAGE": "a-value-of-the-image"})
    assert masked("a-value-of-the-image") == "a-value-of-the-image"


def test_samples_are_shown_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", VALUE)
    row = SampleRow(source="s", prompt=VALUE, response=f"<{VALUE}>", turns=[{"by": "environment", "text": VALUE}])
    assert (row.prompt, row.response, row.turns) == ("***", "<***>", [{"by": "environment", "text": "***"}])


def test_a_status_keeps_its_names_and_numbers_whatever_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods that are to be removed are known by their names."""
    monkeypatch.setenv("WANDB_KEY", "math-grpo-1")
    monkeypatch.setenv("PIN_KEY", "0.12345678")
    engine = {"name": "0", "state": "serving", "pod": "math-grpo-1-rollout-x"}
    given = {
        "generation": 1,
        "attempt": 1,
        "time": "2026-01-01T00:00:00Z",
        "doing": "waits for math-grpo-1",
        "pools": {"rollout": {"desired": 1, "ready": 1, "engines": [engine]}, "trainer": {"desired": 1, "ready": 1}},
        "shares": {"update": 0.12345678},
    }
    plain = json.loads(shown(DriverStatus.model_validate_json(json.dumps(given))))
    assert plain["doing"] == "waits for ***"
    assert plain["pools"]["rollout"]["engines"][0]["pod"] == "math-grpo-1-rollout-x"
    assert plain["shares"] == {"update": 0.12345678}


def test_an_error_of_a_command_is_said_without_them(tmp_path: Path) -> None:
    text = (
        "import sys; from rljob_trainer.cli import main; "
        f"sys.exit(main(['run', {str(tmp_path / VALUE.replace('/', '_'))!r}]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", text],
        env={"JUDGE_KEY": VALUE.replace("/", "_"), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 64
    assert "***" in run.stderr
    assert VALUE.replace("/", "_") not in run.stderr + run.stdout
