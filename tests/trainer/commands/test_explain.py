"""`rljob explain`: what it says about fields, sections and presets."""

from __future__ import annotations

import pytest
import yaml

from rljob_api import schema
from rljob_api.presets import PRESETS
from rljob_trainer.cli import main


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_the_whole_document(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys)
    assert "KIND:     RLJob\nVERSION:  rljob.dev/v1alpha1" in text
    for name in ("apiVersion", "kind", "metadata", "spec"):
        assert f"  {name}\t<" in text


def test_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "trainer.optimizer.learningRate")
    assert "FIELD:    spec.trainer.optimizer.learningRate <number>" in text
    assert "BOUNDS:   above 0, at most 1" in text
    assert "DEFAULT:  1e-06" in text
    assert "CHANGE:   cannot be changed after creation" in text
    assert "Peak learning rate." in text


def test_choices_and_classes_of_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ALLOWED:  sync, oneStepOff, fullyAsync" in page(capsys, "pipeline.mode")
    assert "may be changed while the job runs" in page(capsys, "pipeline.staleness.maxAge")
    assert "may be changed while the job is suspended" in page(capsys, "image")


def test_a_section_does_not_deny_what_its_fields_allow(capsys: pytest.CaptureFixture[str]) -> None:
    """Some of a pool's settings may be changed while the job runs; an optimizer's may not."""
    for path in ("spec", "rollout", "pipeline"):
        assert "CHANGE:   cannot be changed after creation, except fields that say otherwise\n" in page(capsys, path)
    assert "CHANGE:   cannot be changed after creation\n" in page(capsys, "trainer.optimizer")


def test_a_section_lists_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "reward.functions")
    assert "spec.reward.functions <[]object> -required-" in text
    assert "BOUNDS:   1 to 32 items" in text
    assert "  weight\t<number>\n    default 1.0; -1000 to 1000" in text


@pytest.mark.parametrize("path", ["rljob.spec.batch", "spec.batch", "batch", "RLJob.spec.batch"])
def test_ways_to_write_a_path(capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert "FIELD:    spec.batch <object>" in page(capsys, path)


def test_list_positions_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert page(capsys, "reward.functions[0].type") == page(capsys, "reward.functions.type")


def test_recursive(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "--recursive", "pipeline")
    assert "  staleness\t<object>\n    maxAge\t<integer>" in text
    assert "  mode\t<string> (default sync)" in text
    lines = page(capsys, "-r").splitlines()
    assert len(lines) == len(list(schema.walk()))


@pytest.mark.parametrize("path", [path for path, _ in schema.walk()])
def test_every_field_can_be_explained(capsys: pytest.CaptureFixture[str], path: str) -> None:
    text = page(capsys, path)
    assert path in text
    assert "DESCRIPTION:" in text


@pytest.mark.parametrize("name", ["maxAge", "staleness.maxAge"])
def test_a_field_is_found_wherever_it_is(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert page(capsys, name) == page(capsys, "spec.pipeline.staleness.maxAge")


def test_all_fields_of_a_name_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert page(capsys, "learningRate").splitlines() == [
        "There are 2 fields with that name:",
        "  spec.algorithm.critic.learningRate\t<number>",
        "    Peak learning rate. Default: 1e-5.",
        "  spec.trainer.optimizer.learningRate\t<number>",
        "    Peak learning rate.",
    ]
    assert "  spec.trainer.pod.nodeSelector\t<map[string]string>\n" in page(capsys, "nodeSelector")
    assert ".pod." not in page(capsys, "name")


def test_a_preset_is_found_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert page(capsys, "dapo") == page(capsys, "algorithm.presets.dapo")


def test_methods_and_their_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "algorithm.policyLoss")
    assert "  ppoClip: clipLow 0.2, clipHigh 0.2, dualClip off" in text
    assert "  sapo: tauPositive 1.0, tauNegative 1.05" in text
    assert "  gae: gamma 1.0, lambda 1.0, whiten true" in page(capsys, "algorithm.advantage")


@pytest.mark.parametrize("field", ["type", "params"])
def test_reward_functions_and_their_parameters(capsys: pytest.CaptureFixture[str], field: str) -> None:
    text = page(capsys, f"reward.functions.{field}")
    for line in (
        "  gsm8k: method strict (or flexible), formatScore 0.0",
        "  math: boxedOnly false",
        "  exactMatch: ignoreCase true, partial false",
        "  pattern: full false, ignoreCase false",
        "  length: coefficient -0.001, freeTokens 0",
        "    `coefficient` for each response token after the first `freeTokens`.",
        "  custom: those of your function",
    ):
        assert f"{line}\n" in text


def test_the_list_of_presets(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "algorithm.presets")
    for name, preset in PRESETS.items():
        assert f"  {name}\n" in text
        assert preset.source in " ".join(text.split())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_printed_as_it_would_be_written(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = page(capsys, f"algorithm.presets.{name}")
    settings = yaml.safe_load(text.split("FILLS IN")[1].split("\n", 1)[1])
    assert settings["algorithm"]["preset"] == name
    assert settings["algorithm"]["policyLoss"]["type"]
    assert settings["batch"]["samplesPerPrompt"] >= 1


def test_dapo_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "algorithm.presets.dapo")
    for line in ("SOURCE:   arXiv 2503.14476", "clipHigh: 0.28", "aggregation: tokenMean", "dropUniform: true"):
        assert line in text


@pytest.mark.parametrize(
    ("path", "phrase"),
    [
        ("trainer.optimiser", "did you mean optimizer?"),
        ("rollout.sampling.topp", "did you mean topP?"),
        ("trainer.lr", "did you mean spec.trainer.optimizer.learningRate?"),
        ("maxage", "did you mean spec.pipeline.staleness.maxAge?"),
        ("fullyAsync", "it is a value of spec.pipeline.mode"),
        ("spec.zzz", "its fields are image, model"),
        ("suspend.more", "spec.suspend has no fields"),
        ("algorithm.presets.dpo", "did you mean dapo?"),
        ("algorithm.presets.xyzzy", "use one of ppo, grpo"),
    ],
)
def test_unknown_paths(capsys: pytest.CaptureFixture[str], path: str, phrase: str) -> None:
    assert main(["explain", path]) == 2
    captured = capsys.readouterr()
    assert phrase in captured.err
    assert captured.out == ""
