"""Two backends of different build give the same numbers through the same group, loss and checkpoint.

The second one (``pipeline_backend``) has stages: outputs on the last of them only, and half as many data indices as
ranks. What it is compared with is one rank of ``fsdp2``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pipeline_backend
import pytest
import torch
from pipeline_backend import Pipeline, PipelineFedFromBehind
from safetensors.torch import load_file
from whole_state import whole

from rljob_api import schema
from rljob_trainer.driver.local_ray import ray_for_run
from rljob_trainer.errors import CheckpointError, JobFileError
from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.backends import BUILT_IN, backend_of
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.group import LearnerGroup
from rljob_trainer.learner.options import GroupOptions
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.work import cut, data_indices_of
from rljob_trainer.weights import learner_side
from rljob_trainer.weights.manifest import added_up, manifest_of
from rljob_trainer.weights.shards import Shard

SUPPORT = str(Path(pipeline_backend.__file__).parent)
NAME = "pipeline_backend:Pipeline"
LOSSES = {
    "ppo": LossSettings(entropy_coefficient=0.01, kl_kind="k3", kl_coefficient=0.1, temperature=0.8),
    # Which tokens it clips is found over the whole mini-batch, on all ranks together.
    "clipCov": LossSettings(policy_loss="clipCov", policy_loss_params={"covariance_fraction": 0.3}),
}


@pytest.fixture(scope="module")
def one(untied_folder: Path) -> LearnerSettings:
    """One rank of fsdp2."""
    optimizer = OptimizerSettings(learning_rate=1e-3, weight_decay=0.0)
    return LearnerSettings(untied_folder, actor=optimizer, micro_batch_tokens=60, lanes=1)


def piped(one: LearnerSettings) -> LearnerSettings:
    return replace(one, backend=NAME, code_paths=(SUPPORT,), ranks=4)


def gradient(
    rank: int, address: str, kind: type[Any], settings: LearnerSettings, batch: SequenceBatch, loss: LossSettings
) -> dict[str, torch.Tensor]:
    """The whole gradient of one mini-batch, by parameter."""
    backend = kind()
    learner: LearnerRank = backend.start(settings, rank, address, 120.0)
    work = cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings))
    learner.gradient([learner.actor], work.sent()[rank], 0, loss)
    module, layout = learner.actor.module, learner.actor.layout
    return whole([layout.shard(n, p, layout.local(p.grad)) for n, p in module.named_parameters() if p.grad is not None])


@pytest.mark.slow(stands_for="[ppo-PipelineFedFromBehind]")
@pytest.mark.parametrize("kind", [Pipeline, PipelineFedFromBehind])
@pytest.mark.parametrize("loss", LOSSES)
def test_stages_have_the_gradient_of_one_rank(
    kind: type[Any], loss: str, ranks: Any, make_batch: Callable[..., SequenceBatch], one: LearnerSettings
) -> None:
    # So short that one data index has an empty micro-batch, which counts nothing.
    for batch in (make_batch(), make_batch(groups=1, samples=3, seed=3)):
        [expected] = ranks.run(1, gradient, Fsdp2, one, batch, LOSSES[loss])
        for found in ranks.run(4, gradient, kind, replace(one, ranks=4), batch, LOSSES[loss]):
            assert found.keys() == expected.keys()
            names = list(expected)
            difference = torch.cat([(found[n] - expected[n]).flatten() for n in names]).norm()
            assert difference < 1e-5 * torch.cat([expected[n].flatten() for n in names]).norm()


def published(
    rank: int, address: str, kind: type[Any], settings: LearnerSettings
) -> tuple[dict[str, int], dict[str, int]]:
    """What a rank adds to the manifest, and that of what it sees published."""
    learner = kind().start(settings, rank, address, 120.0)
    return dict(learner_side.sums(learner)), dict(manifest_of(learner.named_parameters_for_publish()).sums)


def test_stages_publish_what_one_rank_does_and_answer_for_all_of_it_once(ranks: Any, one: LearnerSettings) -> None:
    [(_, expected)] = ranks.run(1, published, Fsdp2, one)
    told = ranks.run(4, published, Pipeline, replace(one, ranks=4))
    assert [seen for _, seen in told] == [expected] * 4
    assert added_up(own for own, _ in told) == expected


@pytest.fixture(scope="module")
def _ray(forked_workers: None) -> Iterator[None]:
    with ray_for_run(cpus=5):
        yield


@pytest.mark.slow(stands_for="test_stages_publish_what_one_rank_does_and_answer_for_all_of_it_once")
@pytest.mark.usefixtures("_ray")
async def test_one_group_of_either_backend_trains_alike_and_reads_what_the_other_has_written(
    make_batch: Callable[..., SequenceBatch], one: LearnerSettings, tmp_path: Path
) -> None:
    batch, loss = make_batch(), LOSSES["ppo"]
    minis = [range(0, 12), range(12, 24)]
    wanted = ScoreRequest(0.8, log_probs=True, entropy=True, sum_squared_probs=True)
    folders = [tmp_path / name for name in ("plain", "piped", "again")]
    for folder in folders:
        folder.mkdir()
    options = GroupOptions(start_seconds=600, call_seconds=300)
    groups = [await LearnerGroup.start(settings, options) for settings in (one, piped(one))]
    plain, stages = groups
    try:
        assert stages.facts == plain.facts

        async def are_alike() -> None:
            told = [await group.score(batch, wanted) for group in groups]
            for name in ("log_probs", "entropy", "sum_squared_probs"):
                ours, theirs = (vars_of(result)[name] for result in told)
                np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)

        async def train() -> None:
            results = [await group.update(batch, loss, minis) for group in groups]
            ours, theirs = (result.metrics for result in results)
            assert [result.actor_steps for result in results] == [2, 2]
            for name in ("actor/policy_loss", "actor/grad_norm", "actor/ratio/max", "actor/entropy", "kl/in_loss"):
                assert theirs[name] == pytest.approx(ours[name], rel=1e-5, abs=1e-6), name
            first = [result.first_log_probs for result in results]
            np.testing.assert_allclose(*first, atol=1e-5)
            assert theirs["balance/rank_tokens/mean"] > 0

        await are_alike()
        await train()
        await train()
        await are_alike()
        for group, folder in zip(groups, folders, strict=False):
            await group.save(folder, "a run")
        # Each goes on from the other's state: masters, moments and the schedule's clock.
        await plain.load(folders[1], "a run")
        await stages.load(folders[0], "a run")
        await train()
        await are_alike()
        await stages.export(tmp_path / "exported")
        await plain.export(folders[2])
        ours, theirs = (load_file(folder / "model.safetensors") for folder in (folders[2], tmp_path / "exported"))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(theirs[name], tensor, rtol=2**-7, atol=1e-5)  # stored in bfloat16
    finally:
        for group in groups:
            await group.close()


def vars_of(result: Any) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ("log_probs", "entropy", "sum_squared_probs")}


class OtherMoments(Pipeline):
    """Keeps its moments in a form of its own: both of a parameter in one tensor."""

    def start(self, settings: LearnerSettings, rank: int, address: str, timeout_seconds: float) -> LearnerRank:
        learner = super().start(settings, rank, address, timeout_seconds)
        state = learner.actor.optimizer.state

        def joined() -> list[Shard]:
            kept = [shard for shard in state() if shard.name.endswith(".exp_avg")]
            return [replace(shard, name=shard.name + "_and_exp_avg_sq") for shard in kept]

        learner.actor.optimizer.state = joined  # type: ignore[method-assign]
        return learner


def save_from(rank: int, address: str, kind: type[Any], settings: LearnerSettings, folder: Path) -> None:
    kind().start(settings, rank, address, 120.0).save(folder)


def load_into(rank: int, address: str, kind: type[Any], settings: LearnerSettings, folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        kind().start(settings, rank, address, 120.0).load(folder)
    return str(refused.value)


def test_what_another_backend_keeps_otherwise_is_refused_in_words(
    ranks: Any, one: LearnerSettings, tied_folder: Path, tmp_path: Path
) -> None:
    stages = replace(piped(one), backend="stages")
    ranks.run(4, save_from, OtherMoments, stages, tmp_path)
    [said] = ranks.run(1, load_into, Fsdp2, one, tmp_path)
    assert "was written by the backend stages with an optimizer state that fsdp2 stores differently" in said
    assert "actor.optimizer.language_model" in said
    assert "continue with trainer.backend: stages" in said
    # The weights alone are read, whoever wrote them.
    Fsdp2().start(one).load_weights(tmp_path)
    [said] = ranks.run(1, load_into, Fsdp2, replace(one, model_path=tied_folder), tmp_path)
    assert "belongs to another model, or was written by a backend (stages) that pads it" in said


# --- cutting by placement and rules ----------------------------------------------------------------------------------


def test_shares_go_to_who_needs_them_and_outputs_come_from_who_returns_them(
    make_batch: Callable[..., SequenceBatch],
) -> None:
    batch = make_batch()
    placement = [
        Placement(1, needs_inputs=False, returns_outputs=False),
        Placement(0),
        Placement(1),
        Placement(0, returns_outputs=False),
    ]
    work = cut(batch, [range(12), range(12, 24)], placement, RowRules(60, count_multiple=3))
    sent = work.sent()
    assert len(work.shares) == 2
    assert sent[1] is sent[3] is work.shares[0]
    assert sent[2] is work.shares[1]
    assert len(sent[0].batch) == 0
    assert not sent[0].seals
    assert [len(minis) for minis in sent[0].micro_batches] == [len(minis) for minis in sent[2].micro_batches]
    assert all(not len(micro) for minis in sent[0].micro_batches for micro in minis)
    assert work.returned(["a", "b", "c", "d"]) == ["b", "c"]
    for number in range(2):
        counts = {len(share.micro_batches[number]) for share in work.shares}
        assert len(counts) == 1
        assert counts.pop() % 3 == 0
    # Every sequence is somebody's, once, whatever the rules.
    seen = np.concatenate(
        [share_indices[micro] for share, share_indices in zip(work.shares, work.indices, strict=True)
         for minis in share.micro_batches for micro in minis]
    )  # fmt: skip
    assert sorted(seen.tolist()) == list(range(len(batch)))


@pytest.mark.parametrize(
    "placement",
    [
        [Placement(0), Placement(2)],
        [Placement(0), Placement(0)],
        [Placement(0), Placement(1, returns_outputs=False)],
    ],
    ids=["a gap", "two that return", "none that returns"],
)
def test_a_placement_without_one_output_an_index_is_refused(placement: Sequence[Placement]) -> None:
    with pytest.raises(ValueError, match="data indices 0, 1"):
        data_indices_of(placement)


# --- finding a backend -----------------------------------------------------------------------------------------------


def test_a_backend_is_found_by_its_name_or_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert isinstance(backend_of("fsdp2"), Fsdp2)
    (tmp_path / "of_a_user.py").write_text("from pipeline_backend import Pipeline as Own\nclass Nothing: ...\n")
    monkeypatch.setattr("sys.path", [*sys.path])
    assert isinstance(backend_of("of_a_user:Own", [str(tmp_path)]), Pipeline)
    with pytest.raises(JobFileError, match=r"of_a_user:Absent: the module \w*of_a_user has no Absent"):
        backend_of("of_a_user:Absent")
    with pytest.raises(JobFileError, match="is not a backend, it has no placement, rules"):
        backend_of("of_a_user:Nothing")


def test_the_names_that_a_job_may_say_are_those_of_the_backends_that_are_built_in() -> None:
    field = schema.find(("spec", "trainer", "backend"))
    assert field is not None
    assert field.pattern is not None
    assert field.pattern.removeprefix("^(").split("|[", 1)[0].split("|") == list(BUILT_IN)


async def test_a_job_that_a_backend_cannot_do_is_refused_before_anything_starts(one: LearnerSettings) -> None:
    with pytest.raises(JobFileError, match="the pipeline trains no critic"):
        await LearnerGroup.start(replace(piped(one), critic=OptimizerSettings()))
