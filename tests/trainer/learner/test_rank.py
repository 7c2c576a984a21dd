"""One rank: learning, on-policy ratios, skipped steps, what publication and export give."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cut_for import cut_for
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from whole_state import parts

from rljob_trainer.errors import JobFileError, StepGivenUpError
from rljob_trainer.learner import models
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.metrics import update_result
from rljob_trainer.learner.optim import StepOutcome
from rljob_trainer.learner.prefixes import offsets_of
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest, UpdateResult
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.trained import Trained
from rljob_trainer.telemetry.names import check_all


def update(rank: LearnerRank, batch: SequenceBatch, minis: list[Any] | None = None, **options: Any) -> UpdateResult:
    loss = options.pop("loss", LossSettings())
    work = cut_for(batch, minis or [range(len(batch))], ranks=1, token_budget=rank.settings.micro_batch_tokens)
    return update_result([rank.update(work.shares[0], loss, UpdateRequest(**options))], work, batch)


def score(rank: LearnerRank, batch: SequenceBatch, temperature: float = 1.0, **wanted: bool) -> dict[str, np.ndarray]:
    work = cut_for(batch, [range(len(batch))], ranks=1, token_budget=rank.settings.micro_batch_tokens)
    streams = rank.score(work.shares[0], ScoreRequest(temperature, **wanted)).streams
    return {n: work.merge(batch, [s], per_sequence=n == "final_values") for n, s in streams.items()}


@pytest.fixture
def settings(tied_folder: Path) -> LearnerSettings:
    return LearnerSettings(
        tied_folder,
        actor=OptimizerSettings(learning_rate=3e-3, weight_decay=0.0),
        critic=OptimizerSettings(learning_rate=3e-3, weight_decay=0.0),
        micro_batch_tokens=100,
    )


def test_the_actor_makes_good_tokens_likelier(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    batch = replace(make_batch(), old_log_probs=None, weights=None)
    batch = replace(batch, advantages=np.where(np.arange(len(batch.mask)) % 2 == 0, 1.0, -1.0).astype(np.float32))
    rank = Fsdp2().start(settings)
    before = score(rank, batch, log_probs=True)["log_probs"]
    for _ in range(5):
        update(rank, batch)
    gain = (score(rank, batch, log_probs=True)["log_probs"] - before)[batch.mask]
    assert gain[batch.advantages[batch.mask] > 0].mean() > 0.05
    assert gain[batch.advantages[batch.mask] < 0].mean() < -0.05


def test_a_whole_update_runs_where_only_deterministic_kernels_may(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    """Torch refuses others by name; the kernels of a GPU are gpu-check's to try."""
    losses = LossSettings(entropy_coefficient=0.01)
    results = []
    try:
        for deterministic in (False, True):
            rank = Fsdp2().start(replace(settings, deterministic=deterministic))
            assert torch.are_deterministic_algorithms_enabled() == deterministic
            update(rank, make_batch(), loss=losses)
            results.append(score(rank, make_batch(), log_probs=True)["log_probs"])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    np.testing.assert_array_equal(*results)


def test_the_critic_learns_a_constant(settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]) -> None:
    batch = make_batch()
    batch = replace(batch, returns=np.full(len(batch.mask), 0.7, dtype=np.float32))
    rank = Fsdp2().start(settings)
    assert not score(rank, batch, values=True)["values"].any()  # the head begins at zero
    for _ in range(40):
        result = update(rank, batch, update_actor=False, update_critic=True)
    assert (result.actor_steps, result.critic_steps) == (0, 1)
    values = score(rank, batch, values=True)
    np.testing.assert_allclose(values["values"][batch.mask], 0.7, atol=0.1)
    assert result.metrics["critic/value_loss"] < 0.5 * 0.1**2
    assert "critic/explained_variance" not in result.metrics  # a constant has no variance to explain


def test_explained_variance_against_its_definition(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    batch = make_batch()
    rank = Fsdp2().start(settings)
    update(rank, batch, update_critic=True, update_actor=False)
    values = score(rank, batch, values=True)["values"][batch.mask]
    result = update(rank, batch, update_critic=True, update_actor=False)
    returns = batch.returns[batch.mask].astype(np.float64)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert result.metrics["critic/explained_variance"] == pytest.approx(expected, abs=1e-5)
    assert result.metrics["critic/prediction/mean"] == pytest.approx(values.mean(), abs=1e-5)


def test_without_old_log_probs_the_ratio_is_exactly_one(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    batch = replace(make_batch(), old_log_probs=None, weights=None)
    result = update(Fsdp2().start(settings), batch, [range(0, 12), range(12, 24)] * 2)
    assert result.metrics["actor/ratio/mean"] == 1.0
    assert result.metrics["actor/clip_fraction"] == 0.0
    assert result.actor_steps == 4


def test_extremes_of_the_ratio_are_over_all_micro_batches_and_steps(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    rank = Fsdp2().start(replace(settings, actor=OptimizerSettings(learning_rate=1e-12, weight_decay=0.0)))
    batch = replace(make_batch(), weights=None)
    ours = score(rank, batch, log_probs=True)["log_probs"]
    batch = replace(batch, old_log_probs=ours + np.random.default_rng(0).normal(0, 0.3, len(ours)).astype(np.float32))
    metrics = update(rank, batch, [range(0, 12), range(12, 24)]).metrics
    ratios = np.exp(ours - batch.old_log_probs)[batch.mask]
    assert metrics["actor/steps"] == 2
    assert metrics["actor/ratio/max"] == pytest.approx(ratios.max(), rel=1e-4)
    assert metrics["actor/ratio/min"] == pytest.approx(ratios.min(), rel=1e-4)
    check_all(metrics)


def test_metrics_are_means_over_tokens_and_have_public_names(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    batch = make_batch()
    rank = Fsdp2().start(replace(settings, reference=True))
    streams = score(rank, batch, 0.8, log_probs=True, entropy=True)
    loss = LossSettings(temperature=0.8, kl_kind="k1", kl_coefficient=0.01, value_clip=0.2)
    metrics = update(rank, batch, loss=loss, update_critic=True).metrics
    mask = batch.mask
    assert metrics["actor/entropy"] == pytest.approx(streams["entropy"][mask].mean(), rel=1e-5)
    k1 = (streams["log_probs"] - batch.ref_log_probs)[mask].mean()
    assert metrics["kl/in_loss"] == pytest.approx(k1, rel=1e-4)
    approx_kl = (batch.old_log_probs - streams["log_probs"])[mask].mean()
    assert metrics["actor/approx_kl"] == pytest.approx(approx_kl, rel=1e-4)
    check_all(metrics)  # raises for a name that the catalogue lacks


@pytest.mark.parametrize("threads", [1, 2])
def test_the_exact_kl_of_scores_is_that_of_the_folders_logits(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch], tmp_path: Path, threads: int
) -> None:
    """With transformers' own forward pass, one sequence after the other, in float64."""
    batch = replace(make_batch(), weights=None)
    rank = Fsdp2().start(replace(settings, reference=True, lanes=threads))
    for _ in range(3):
        update(rank, batch)
    rank.export(tmp_path / "trained")
    ours = score(rank, batch, 0.7, log_probs=True, vocabulary_kl=True, reference=True)
    plain = score(rank, batch, 0.7, log_probs=True, reference=True)
    for name, stream in plain.items():
        np.testing.assert_allclose(ours[name], stream, atol=1e-6)
    of = [AutoModelForCausalLM.from_pretrained(path).double() for path in (tmp_path / "trained", settings.model_path)]
    expected, begin = [], 0
    for prompt, response in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
        ids = torch.from_numpy(batch.token_ids[begin : begin + prompt + response].astype(np.int64))[None]
        begin += prompt + response
        with torch.no_grad():
            p, q = (model(ids).logits[0, prompt - 1 : -1].div(0.7).log_softmax(-1).numpy() for model in of)
        expected += (np.exp(p) * (p - q)).sum(-1).tolist()
    np.testing.assert_allclose(ours["vocabulary_kl"], expected, rtol=1e-4, atol=1e-5)
    assert max(expected) > 1e-3


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_named(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    batch = make_batch()
    first = offsets_of(batch.response_lengths)
    batch.mask[first[5]] = True
    batch.advantages[first[5]] = np.nan
    rank = Fsdp2().start(settings)
    twin = Fsdp2().start(settings)
    result = update(rank, batch, [range(0, 12), range(12, 24)], update_critic=True)
    assert len(result.skipped) == 1
    assert result.skipped[0].startswith("actor, mini-batch 0: the gradient of ")
    assert result.skipped[0].endswith("is not finite; step skipped")
    assert (result.actor_steps, result.critic_steps) == (1, 2)
    assert result.metrics["actor/skipped_steps"] == 1
    assert all(np.isfinite(v) for v in result.metrics.values())
    update(twin, batch, [range(12, 24)])
    for (name, ours), (_, theirs) in zip(
        rank.named_parameters_for_publish(), twin.named_parameters_for_publish(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_the_schedule_counts_updates_not_optimizer_steps(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    batch = make_batch(groups=2)
    schedule = OptimizerSettings(learning_rate=0.1, warmup_steps=4)
    rank = Fsdp2().start(replace(settings, actor=schedule))
    rates = []
    for number in range(5):
        result = update(rank, batch, [range(len(batch))] * (number + 1), update_critic=number == 0)
        rates.append(result.metrics["actor/learning_rate"])
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    rank = Fsdp2().start(replace(settings, actor=schedule))
    pulls = [update(rank, batch, continues=number % 2 == 1).metrics["actor/learning_rate"] for number in range(6)]
    assert pulls == pytest.approx([0.025, 0.025, 0.05, 0.05, 0.075, 0.075])
    with pytest.raises(ValueError, match=r"stop\.steps"):
        Fsdp2().start(replace(settings, actor=replace(schedule, schedule="cosine")))


def test_after_a_warm_up_of_the_critic_both_schedules_end_at_the_last_step(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    falling = OptimizerSettings(learning_rate=0.1, schedule="linear", min_learning_rate_ratio=0.2)
    rank = Fsdp2().start(replace(settings, actor=falling, critic=falling, total_updates=5, critic_warmup_updates=2))
    batch = make_batch(groups=1)
    metrics = [update(rank, batch, update_actor=step >= 2, update_critic=True).metrics for step in range(5)]
    rates = [step.get("actor/learning_rate") for step in metrics]
    assert rates == [None, None, *(pytest.approx(rate) for rate in (0.1, 0.06, 0.02))]
    rates = [step["critic/learning_rate"] for step in metrics]
    assert rates == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])


def test_a_score_sees_the_weights_that_the_version_began_with(
    tied_folder: Path, make_batch: Callable[..., SequenceBatch]
) -> None:
    settings = LearnerSettings(tied_folder, actor=OptimizerSettings(learning_rate=1e-2))
    batch = make_batch()
    rank, twin = Fsdp2().start(settings), Fsdp2().start(settings)
    with pytest.raises(ValueError, match="the update kept none"):
        score(rank, batch, log_probs=True, anchored=True)

    before = score(rank, batch, log_probs=True)["log_probs"]
    update(rank, batch, keep_anchor=True)
    for _ in range(2):
        np.testing.assert_array_equal(score(rank, batch, log_probs=True, anchored=True)["log_probs"], before)
        assert np.abs(score(rank, batch, log_probs=True)["log_probs"] - before).max() > 1e-3
        update(rank, batch, continues=True)

    update(rank, batch, keep_anchor=True)
    moved = score(rank, batch, log_probs=True, anchored=True)["log_probs"]
    assert np.abs(moved - before).max() > 1e-3

    for continues in (False, True, True, False):
        update(twin, batch, continues=continues)
    for (name, ours), (_, theirs) in zip(
        rank.named_parameters_for_publish(), twin.named_parameters_for_publish(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_the_same_work_gives_the_same_bits(settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]) -> None:
    batch = make_batch()
    results = []
    for _ in range(2):
        rank = Fsdp2().start(settings)
        metrics = update(rank, batch, [range(0, 12), range(12, 24)], update_critic=True).metrics
        learned = {name: value for name, value in metrics.items() if not name.startswith(("timing/", "memory/"))}
        results.append((learned, [t.clone() for _, t in rank.named_parameters_for_publish()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_the_reference_stays_where_the_actor_began(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch]
) -> None:
    batch = make_batch()
    rank = Fsdp2().start(replace(settings, reference=True))
    before = score(rank, batch, log_probs=True, reference=True)
    np.testing.assert_array_equal(before["log_probs"], before["ref_log_probs"])
    update(rank, batch)
    after = score(rank, batch, log_probs=True, reference=True)
    np.testing.assert_array_equal(before["ref_log_probs"], after["ref_log_probs"])
    assert np.abs(after["log_probs"] - before["log_probs"]).max() > 1e-3
    with pytest.raises(ValueError, match="the job keeps none"):
        score(Fsdp2().start(settings), batch, reference=True)


def test_publication_gives_live_tensors_once_each(settings: LearnerSettings, untied_folder: Path) -> None:
    for folder, tied in ((settings.model_path, True), (untied_folder, False)):
        rank = Fsdp2().start(replace(settings, model_path=folder))
        named = dict(rank.named_parameters_for_publish())
        assert ("lm_head.weight" in named) != tied
        live = dict(rank.live_model.named_parameters())
        assert named.keys() == live.keys()
        assert all(named[name].data_ptr() == live[name].data_ptr() for name in named)
        assert not any(t.requires_grad for t in named.values())


@pytest.mark.parametrize(("folder", "dtype"), [("tied_folder", torch.float32), ("untied_folder", torch.bfloat16)])
def test_an_export_is_a_model_folder(
    folder: str,
    dtype: torch.dtype,
    settings: LearnerSettings,
    make_batch: Callable[..., SequenceBatch],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    source = request.getfixturevalue(folder)
    rank = Fsdp2().start(replace(settings, model_path=source))
    update(rank, make_batch())
    rank.export(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    for name, tensor in rank.named_parameters_for_publish():
        assert torch.equal(loaded.get_parameter(name), tensor.to(dtype)), name
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")("w3 w5")["input_ids"] == [3, 5]


def test_a_large_export_is_cut_into_files(settings: LearnerSettings, tmp_path: Path) -> None:
    from rljob_trainer.learner.export import write_folder

    rank = Fsdp2().start(settings)
    parameters = list(rank._policy.published())
    write_folder(tmp_path, settings.model_path, lambda: parameters, Layout(), writer=True, file_bytes=64 << 10)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.get_parameter(name), p) for name, p in parameters)


def test_a_folder_that_is_no_model(settings: LearnerSettings, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"has no config\.json; use a Hugging Face"):
        Fsdp2().start(replace(settings, model_path=tmp_path))
    (tmp_path / "config.json").write_bytes((settings.model_path / "config.json").read_bytes())
    with pytest.raises(JobFileError, match=r"spec\.model: .*cannot be loaded"):
        Fsdp2().start(replace(settings, model_path=tmp_path))


def test_a_package_that_is_missing_is_no_fault_of_the_models_folder(
    settings: LearnerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as if it were not installed
    with pytest.raises(JobFileError, match=r"cannot be loaded, .*accelerate.*; install it") as told:
        models._load(settings.model_path, torch.bfloat16, False, empty=True)
    assert "copy it" not in str(told.value)


def test_ranks_and_copies_must_fit(tied_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"replicate x context x tensor = 2 x 1 x 1 does not divide .* ranks, 3"):
        LearnerSettings(tied_folder, ranks=3, replicate=2)


def state_of(rank: LearnerRank) -> dict[str, torch.Tensor]:
    assert rank.critic is not None
    return {name: tensor.clone() for name, tensor in parts(rank.actor.state() + rank.critic.state()).items()}


def asked_at(rank: LearnerRank, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks the rank to give up just before the check of that number, from 1."""
    check, calls = rank.giving_up.check, iter(range(1, 1000))

    def counted() -> None:
        if next(calls) == call:
            rank.giving_up.ask()
        check()

    monkeypatch.setattr(rank.giving_up, "check", counted)


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_update_that_is_given_up_has_changed_nothing(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch], lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    rank, other = (Fsdp2().start(replace(settings, lanes=lanes)) for _ in range(2))
    for trained in (rank, other):
        update(trained, batch, update_critic=True)
    before = state_of(rank)
    with monkeypatch.context() as patch:
        asked_at(rank, 3, patch)  # in the middle of the first mini-batch
        with pytest.raises(StepGivenUpError):
            update(rank, batch, update_critic=True)
        with pytest.raises(StepGivenUpError):
            score(rank, batch, log_probs=True)
    after = state_of(rank)
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Its clock and its gradients neither: what comes next is what would have come.
    rank.giving_up = other.giving_up
    for trained in (rank, other):
        update(trained, batch, update_critic=True)
    after, expected = state_of(rank), state_of(other)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_an_update_goes_on_to_its_end_after_its_first_optimizer_step(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Fsdp2().start(settings)
    step = rank._step

    def asked_in_a_step(trained: Trained) -> StepOutcome:
        rank.giving_up.ask()
        return step(trained)

    monkeypatch.setattr(rank, "_step", asked_in_a_step)
    batch = make_batch()
    minis = [range(0, 12), range(12, 24)]
    result = update(rank, batch, minis, update_critic=True)
    assert (result.actor_steps, result.critic_steps) == (2, 2)
