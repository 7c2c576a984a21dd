"""Adapters: the same numbers as plain transformers with peft, one sequence at a time, and nothing else is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_mixture import mixture
from transformers import AutoModelForCausalLM
from whole_state import whole

from rljob_trainer.errors import CheckpointError, JobFileError, LearnerError
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, LoraSettings, OptimizerSettings
from rljob_trainer.learner.work import cut
from rljob_trainer.weights import learner_side
from rljob_trainer.weights.manifest import added_up, manifest_of

LORA = LoraSettings(rank=4, alpha=10)
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LOSS = LossSettings(policy_loss_params={"clip_low": 1.0, "clip_high": 1e6}, temperature=0.8)
"""Clipped nowhere."""

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in stacks, which have no adapter, beside attention that has."""
    folder = tmp_path_factory.mktemp("mixture")
    mixture(50).save_pretrained(folder)
    return folder


def settings_for(folder: Path, **changes: Any) -> LearnerSettings:
    plain = LearnerSettings(
        folder,
        lora=LORA,
        micro_batch_tokens=1 << 20,
        reference=True,
        actor=OptimizerSettings(learning_rate=0.01),
        seed=3,
    )
    return replace(plain, **changes)


def started(rank: int, address: str, settings: LearnerSettings) -> LearnerRank:
    """A rank whose adapters are not zero any more: B is drawn, in the order of the names."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    for trained in learner._trained:
        generator = torch.Generator().manual_seed(7)
        for name, parameter in trained.parameters():
            if ".lora_A." not in name:  # B, and a critic's head
                drawn = 0.05 * torch.randn(parameter.shape, generator=generator)
                with torch.no_grad():
                    learner._layout.local(parameter).copy_(learner._layout.part(drawn, parameter))
    return learner


def share_of(learner: LearnerRank, batch: SequenceBatch, minis: int = 1) -> Any:
    backend, mini_batches = Fsdp2(), [range(start, len(batch), minis) for start in range(minis)]
    placement, rules = backend.placement(learner.settings), backend.rules(learner.settings)
    return cut(batch, mini_batches, placement, rules).sent()[learner.rank]


def adapter_of(learner: LearnerRank, model: str = "actor") -> Tensors:
    """What is trained of a model, whole, by the names that peft gives it."""
    (trained,) = (each for each in learner._trained if each.name == model)
    inner = "language_model." if model == "actor" else "backbone."
    return {name.removeprefix(inner): full(parameter).clone() for name, parameter in trained.parameters()}


# --- against peft -----------------------------------------------------------------------------------------------------


def told(rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch) -> dict[str, Any]:
    """A rank's adapters, gradients, streams, weights as they are published, and sums of its own parts."""
    learner = started(rank, address, settings)
    share = share_of(learner, batch)
    streams = learner.score(share, ScoreRequest(LOSS.temperature, log_probs=True, reference=True)).streams
    result: dict[str, Any] = {"streams": streams, "indices": np.concatenate(share.places[0])}
    result["published"] = {name: tensor.clone() for name, tensor in learner.named_parameters_for_publish()}
    result["sums"] = learner_side.sums(learner)
    result["losses"] = 0.0
    for trained in learner._trained:
        inner = "language_model." if trained.name == "actor" else "backbone."
        result[trained.name] = adapter_of(learner, trained.name)
        sums = learner.gradient([trained], share, 0, LOSS)[0].sums
        if Fsdp2().placement(settings)[rank].returns_outputs:
            result["losses"] += float(sums.get(f"{trained.name}/loss", 0.0))
        gradients = {name.removeprefix(inner): full(p.grad).clone() for name, p in trained.parameters()}
        result[f"{trained.name} gradients"] = gradients
        assert all(p.grad is None for p in trained.module.parameters() if not p.requires_grad)
    return result


def by_peft(folder: Path, adapter: Tensors, lora: LoraSettings = LORA) -> PeftModel:
    """transformers' model with peft's adapter, as their own users make it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets or EVERY))
    peft = get_peft_model(model, config)
    named = dict(peft.base_model.model.named_parameters())
    mine = {name for name, parameter in named.items() if parameter.requires_grad}
    assert mine == {name for name in adapter if ".lora_" in name}
    with torch.no_grad():
        for name in mine:
            named[name].copy_(adapter[name])
    return peft.eval()


def sequences(batch: SequenceBatch) -> list[tuple[torch.Tensor, int, slice]]:
    """Each with its prompt's length and its part of the streams."""
    found, at, token = [], 0, 0
    for prompt, response in zip(batch.prompt_lengths, batch.response_lengths, strict=True):
        ids = torch.from_numpy(batch.token_ids[at : at + prompt + response].astype("int64"))
        found.append((ids, int(prompt), slice(token, token + int(response))))
        at, token = at + prompt + response, token + int(response)
    return found


def log_probs_of(model: Any, batch: SequenceBatch) -> torch.Tensor:
    parts = []
    for ids, prompt, _ in sequences(batch):
        logits = model(input_ids=ids[None]).logits[0, prompt - 1 : -1] / LOSS.temperature
        parts.append(torch.log_softmax(logits, -1).gather(1, ids[prompt:, None])[:, 0])
    return torch.cat(parts)


def loss_of(log_probs: torch.Tensor, batch: SequenceBatch) -> torch.Tensor:
    """-A pi_theta / pi_old, times the weights of the correction, over the masked tokens' number."""
    old, advantages, weights, mask = (
        torch.from_numpy(x) for x in (batch.old_log_probs, batch.advantages, batch.weights, batch.mask)
    )
    return -((log_probs - old).exp() * advantages * weights)[mask].sum() / mask.sum()


def far(ours: Tensors, theirs: Tensors) -> float:
    """Norm of the difference over the norm, all tensors together."""
    assert ours.keys() == theirs.keys()
    difference = torch.cat([(ours[name] - theirs[name]).double().flatten() for name in theirs]).norm()
    return float(difference / torch.cat([tensor.double().flatten() for tensor in theirs.values()]).norm())


@pytest.mark.slow(stands_for=["[one]", "[two ranks]"])
@pytest.mark.parametrize(
    ("folder", "count", "changes"),
    [
        ("tied_folder", 1, {}),
        ("untied_folder", 1, {"micro_batch_tokens": 60}),
        (
            "tied_folder",
            1,
            {"activation_checkpointing": True, "lora": replace(LORA, targets=("q_proj", "mlp.down_proj"))},
        ),
        ("untied_folder", 2, {"activation_checkpointing": True, "micro_batch_tokens": 60}),
        ("tied_folder", 2, {"lora": LoraSettings(rank=1, alpha=2)}),
        ("gemma_folder", 2, {"context": 2, "micro_batch_tokens": 100}),
        ("mixture_folder", 2, {"lora": replace(LORA, targets=("q_proj", "k_proj", "v_proj", "o_proj"))}),
    ],
    ids=["one", "lanes", "some layers", "two ranks", "rank 1 on two", "Gemma, rows of two ranks", "experts"],
)
def test_streams_gradients_and_weights_are_those_of_peft(
    folder: str,
    count: int,
    changes: dict[str, Any],
    ranks: Any,
    make_batch: Callable[..., SequenceBatch],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    path, batch = request.getfixturevalue(folder), make_batch()
    settings = settings_for(path, ranks=count, **changes)
    answers = ranks.run(count, told, settings, batch)
    peft = by_peft(path, answers[0]["actor"], settings.lora)
    expected = log_probs_of(peft, batch)
    loss = loss_of(expected, batch)
    loss.backward()
    gradients = {n: p.grad for n, p in peft.base_model.model.named_parameters() if p.grad is not None}
    assert sum(answer["losses"] for answer in answers) == pytest.approx(float(loss.detach()), rel=1e-5)
    with torch.no_grad(), peft.disable_adapter():
        of_base = log_probs_of(peft, batch)
    assert float((of_base - expected).detach().abs().max()) > 0.01
    parts = {"log_probs": expected.detach(), "ref_log_probs": of_base}
    for answer in answers:
        assert far(answer["actor gradients"], gradients) < 1e-5
        places = [sequences(batch)[i][2] for i in answer["indices"]]
        for name, stream in parts.items():
            theirs = torch.cat([stream[place] for place in places])
            assert float((torch.from_numpy(answer["streams"][name]) - theirs).abs().max()) < 1e-5, name
    # What engines are sent is what peft makes of base and adapter, and its sums are those of the ranks' parts.
    peft.merge_and_unload().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for answer in answers:
        assert answer["published"].keys() == tensors.keys()
        for name, tensor in answer["published"].items():
            assert float((tensor - tensors[name]).detach().abs().max()) < 1e-6, name
    assert added_up(answer["sums"] for answer in answers) == manifest_of(answers[0]["published"].items()).sums


@pytest.mark.slow(stands_for="[2]")
@pytest.mark.parametrize("count", [1, 2])
def test_a_critics_gradients_are_those_of_peft(
    count: int, ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    batch = make_batch(groups=4)
    settings = settings_for(tied_folder, ranks=count, critic=OptimizerSettings())
    answers = ranks.run(count, told, settings, batch)
    adapter = answers[0]["critic"]
    weight, bias = (adapter.pop(f"head.{name}").requires_grad_() for name in ("weight", "bias"))
    peft = by_peft(tied_folder, {f"model.{name}": tensor for name, tensor in adapter.items()})
    backbone, values = peft.base_model.model.model, []
    for ids, prompt, _ in sequences(batch):
        states = backbone(input_ids=ids[None]).last_hidden_state[0, prompt - 1 : -1]
        values.append((states @ weight.T + bias)[:, 0])
    returns, mask = torch.from_numpy(batch.returns), torch.from_numpy(batch.mask)
    (0.5 * (torch.cat(values) - returns).square()[mask].sum() / mask.sum()).backward()
    expected = {n: p.grad for n, p in backbone.named_parameters() if p.grad is not None}
    expected |= {"head.weight": weight.grad, "head.bias": bias.grad}
    for answer in answers:
        assert far(answer["critic gradients"], expected) < 1e-5


def test_the_exact_kl_is_that_to_the_base(
    ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    batch = make_batch(groups=4)
    for count in (1, 2):
        settings = settings_for(tied_folder, ranks=count)
        answers = ranks.run(count, exact_kl, settings, batch)
        peft = by_peft(tied_folder, answers[0]["adapter"])
        total = torch.zeros(())
        for ids, prompt, place in sequences(batch):
            ours = torch.log_softmax(peft(input_ids=ids[None]).logits[0, prompt - 1 : -1] / LOSS.temperature, -1)
            with torch.no_grad(), peft.disable_adapter():
                base = torch.log_softmax(peft(input_ids=ids[None]).logits[0, prompt - 1 : -1] / LOSS.temperature, -1)
            kl = (ours.exp() * (ours - base)).sum(-1)
            total = total + kl[torch.from_numpy(batch.mask[place])].sum()
        mean = total / int(batch.mask.sum())
        mean.backward()
        expected = {n: p.grad for n, p in peft.base_model.model.named_parameters() if p.grad is not None}
        assert sum(answer["kl"] for answer in answers) == pytest.approx(float(mean.detach()), rel=1e-4)
        assert far(answers[0]["gradients"], expected) < 1e-4


def exact_kl(rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch) -> dict[str, Any]:
    """The gradient of the KL alone."""
    learner = started(rank, address, settings)
    quiet = replace(batch, advantages=np.zeros_like(batch.advantages))
    loss = replace(LOSS, kl_kind="full", kl_coefficient=1.0)
    sums = learner.gradient([learner.actor], share_of(learner, quiet), 0, loss)[0].sums
    gradients = {n.removeprefix("language_model."): full(p.grad) for n, p in learner.actor.parameters()}
    return {"kl": float(sums["kl/in_loss"]), "gradients": gradients, "adapter": adapter_of(learner)}


# --- what is trained, and what is not ---------------------------------------------------------------------------------


def kept(rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, muon: bool) -> dict[str, Any]:
    """Where the weights are, and how they move in an update."""
    kind = "muon" if muon else "adamw"
    learner = Fsdp2().start(
        replace(settings, actor=replace(settings.actor, kind=kind)), rank, address, timeout_seconds=120
    )
    trained, module = learner.actor, learner.actor.module
    before, frozen = (
        adapter_of(learner),
        {n: full(p).clone() for n, p in module.named_parameters() if not p.requires_grad},
    )
    report = learner.update(share_of(learner, batch, 2), LOSS)
    learner.update(share_of(learner, batch, 2), LOSS)
    after = adapter_of(learner)
    return {
        "first B": max(float(tensor.abs().max()) for name, tensor in before.items() if ".lora_B." in name),
        "moved": {name for name in after if not torch.equal(after[name], before[name])},
        "names": set(after),
        "before": before,
        "trained": {p.dtype for _, p in trained.parameters()},
        "frozen": {p.dtype for p in module.parameters() if not p.requires_grad},
        "still": all(torch.equal(full(p), frozen[n]) for n, p in module.named_parameters() if not p.requires_grad),
        "state": sum(shard.tensor.numel() for shard in trained.optimizer.state()),
        "parameters": sum(learner._layout.local(p).numel() for _, p in trained.parameters()),
        "norm": report.steps[0].grad_norm,
        "notes": report.notes,
    }


@pytest.mark.slow(stands_for="[2-bfloat16-False]")
@pytest.mark.parametrize(
    ("count", "dtype", "muon"),
    [(1, "float32", False), (1, "bfloat16", False), (2, "bfloat16", False), (2, "float32", True)],
)
def test_only_the_adapter_is_trained_in_float32_beside_a_base_in_its_own_precision(
    count: int, dtype: str, muon: bool, ranks: Any, make_batch: Callable[..., SequenceBatch], untied_folder: Path
) -> None:
    settings = settings_for(untied_folder, ranks=count, dtype=dtype)
    answers = ranks.run(count, kept, settings, make_batch(), muon)
    for answer in answers:
        assert answer["first B"] == 0.0
        assert answer["moved"] == answer["names"]
        assert len(answer["names"]) == 2 * 2 * len(EVERY)
        assert answer["trained"] == {torch.float32}
        assert answer["frozen"] == {getattr(torch, dtype)}
        assert answer["still"]
        assert answer["norm"] == pytest.approx(answers[0]["norm"])
        assert not answer["notes"]
        assert all(torch.equal(a, answers[0]["before"][name]) for name, a in answer["before"].items())
        # Two moments, or one, of each number; AdamW counts steps besides.
        assert answer["state"] == (answer["parameters"] if muon else 2 * answer["parameters"] + len(answer["names"]))


def test_the_same_seed_gives_the_same_adapter_on_any_number_of_ranks(
    ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    batch = make_batch()
    first, *others = [
        ranks.run(count, kept, settings_for(tied_folder, ranks=count, seed=seed), batch, False)[0]["before"]
        for count, seed in ((1, 3), (2, 3), (1, 4))
    ]
    same = [all(torch.equal(other[name], tensor) for name, tensor in first.items()) for other in others]
    assert same == [True, False]


def test_a_base_that_changes_is_found_before_the_next_update(
    make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    learner = started(0, "", settings_for(tied_folder))
    share = share_of(learner, make_batch(groups=2))
    learner.update(share, LOSS)
    matrix = learner.actor.module.get_parameter("language_model.model.layers.1.mlp.up_proj.base_layer.weight")
    with torch.no_grad():
        matrix[3, 5] += 1e-3
    with pytest.raises(
        LearnerError, match=r"an adapter have changed: actor\.model\.language_model\.model\.layers\.1\.mlp\.up"
    ):
        learner.update(share, LOSS)


def test_the_weights_that_a_version_began_with_are_those_with_its_adapter(
    make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    learner = started(0, "", settings_for(tied_folder))
    share = share_of(learner, make_batch(groups=2))
    request = ScoreRequest(1.0, log_probs=True)
    before = learner.score(share, request).streams["log_probs"]
    learner.update(share, LOSS, UpdateRequest(keep_anchor=True))
    assert np.abs(learner.score(share, request).streams["log_probs"] - before).max() > 1e-3
    again = learner.score(share, replace(request, anchored=True)).streams["log_probs"]
    assert np.array_equal(again, before)
    assert learner._anchor._kept is not None
    assert len(learner._anchor._kept) == len(learner.actor.parameters())


def test_a_layer_that_is_not_there(tied_folder: Path) -> None:
    for target in ("qkv_proj", "lm_head", "embed_tokens"):
        with pytest.raises(JobFileError, match=rf"called {target}; use one of down_proj, gate_proj, k_proj"):
            Fsdp2().start(settings_for(tied_folder, lora=replace(LORA, targets=("q_proj", target))))


# --- checkpoints and exports ------------------------------------------------------------------------------------------


def resumed(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch, load: str, save: str
) -> tuple[Tensors, str]:
    """Loads or not, updates, saves, updates: the state, and the manifest of what is published of the saved weights."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=60)
    share, both = share_of(learner, batch, 2), UpdateRequest(update_critic=settings.critic is not None)
    if load:
        learner.load(load)
    else:
        learner.update(share, LOSS, both)
        learner.save(save)
    manifest = manifest_of(learner.named_parameters_for_publish()).sha256
    learner.update(share, LOSS, both)
    return whole([shard for model in learner._trained for shard in model.state()]), manifest


@pytest.mark.slow(stands_for="[2]")
@pytest.mark.parametrize("writers", [1, 2])
def test_a_state_is_the_adapters_and_goes_on_bit_for_bit(
    writers: int, ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path, tmp_path: Path
) -> None:
    batch = make_batch(groups=4)
    settings = settings_for(tied_folder, critic=OptimizerSettings(learning_rate=0.01))
    state, manifest = ranks.run(writers, resumed, replace(settings, ranks=writers), batch, "", str(tmp_path))[0]
    of_model = [name for name in state if ".optimizer." not in name]
    assert all(".lora_" in name or ".head." in name for name in of_model)
    assert len(of_model) == 2 * 2 * 2 * len(EVERY) + 2
    for readers in (writers, 3 - writers):
        found = ranks.run(readers, resumed, replace(settings, ranks=readers), batch, str(tmp_path), "")
        for other, again in found:
            assert again == manifest  # on any number of ranks: a resume compares it
            assert other.keys() == state.keys()
            for name, tensor in state.items():
                if readers == writers:
                    assert torch.equal(other[name], tensor), name
                else:
                    assert torch.allclose(other[name], tensor, rtol=1e-3, atol=1e-5), name


def test_an_adapter_is_not_read_beside_another_base(
    make_batch: Callable[..., SequenceBatch], tied_folder: Path, untied_folder: Path, tmp_path: Path
) -> None:
    settings = settings_for(tied_folder)
    learner = started(0, "", settings)
    (tmp_path / "adapter").mkdir()
    learner.save(tmp_path / "adapter")
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tied_folder)
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(other)
    plain = Fsdp2().start(replace(settings, lora=None))
    (tmp_path / "whole").mkdir()
    plain.save(tmp_path / "whole")
    for changed, place, message in (
        (replace(settings, model_path=other), "adapter", "the base's manifest was"),
        (replace(settings, lora=replace(LORA, alpha=11)), "adapter", "spec.model.lora.alpha was 10 and is 11"),
        (replace(settings, lora=replace(LORA, targets=("q_proj",))), "adapter", "spec.model.lora.targets was"),
        (replace(settings, lora=None), "adapter", "is that of an adapter, but spec.model.lora asks for a whole model"),
        (settings, "whole", "is that of a whole model, but spec.model.lora asks for an adapter"),
    ):
        reader = Fsdp2().start(changed)
        for read in (reader.load, reader.load_weights):
            with pytest.raises(CheckpointError, match=message):
                read(tmp_path / place)


@pytest.mark.slow(stands_for="[2]")
@pytest.mark.parametrize("count", [1, 2])
def test_peft_reads_an_exported_adapter_and_transformers_the_merged_model(
    count: int, ranks: Any, make_batch: Callable[..., SequenceBatch], untied_folder: Path, tmp_path: Path
) -> None:
    batch = make_batch(groups=3)
    lora = replace(LORA, targets=("q_proj", "v_proj", "up_proj"))
    settings = settings_for(untied_folder, ranks=count, lora=lora)
    adapter = ranks.run(count, exported, settings, tmp_path)[0]
    expected = log_probs_of(by_peft(untied_folder, adapter, lora), batch).detach()
    base = AutoModelForCausalLM.from_pretrained(untied_folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert loaded.peft_config["default"].base_model_name_or_path == "some/model"
    assert float((log_probs_of(loaded, batch) - expected).detach().abs().max()) < 1e-6
    for mine in (tmp_path / "adapter/adapter_model.safetensors", tmp_path / "merged/model.safetensors"):
        assert mine.stat().st_mode == (tmp_path / "adapter/adapter_config.json").stat().st_mode, "who may read it"
    # The merged model is in the precision of the folder that it came from: bfloat16.
    stored, merged = load_file(tmp_path / "merged/model.safetensors"), loaded.merge_and_unload()
    for name, parameter in merged.named_parameters():
        assert stored[name].dtype == torch.bfloat16
        assert torch.allclose(stored[name].float(), parameter, rtol=2**-8, atol=1e-6), name


def exported(rank: int, address: str, settings: LearnerSettings, folder: Path) -> Tensors:
    learner = started(rank, address, settings)
    learner.export_adapter(folder / "adapter", "some/model")
    learner.export(folder / "merged")
    return adapter_of(learner)
