"""Memory known beforehand: shapes, GPUs, engines, turns on a shared GPU, and the change that makes a job fit.

What a trainer's rank holds is tested where torch is (tests/trainer/learner/test_memory_on_*.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from rljob_api import check, resolve
from rljob_api.memory import ModelShape, UnknownShapeError, bytes_of, known_shape, parts, plan_memory, untold
from rljob_api.memory.accelerators import product_memory
from rljob_api.memory.adapter import AdapterShape
from rljob_api.memory.engine import EngineGpu
from rljob_api.memory.inputs import MemoryInputs
from rljob_api.memory.known import known_models
from rljob_api.memory.plan import MemoryPlan, changes, devices
from rljob_api.notes import notes
from rljob_api.overrides import merged
from rljob_api.resolved import ResolvedJob
from rljob_api.spec.model import RandomModel

GIB = 1 << 30
QWEN = "Qwen/Qwen2.5-7B-Instruct"
SMALL = "Qwen/Qwen2.5-0.5B-Instruct"
SHARE = {"gpu_memory_utilization": 0.6}

# As the pages of the models on huggingface.co say ("Model size", by their safetensors; without output matrices that are
# only stored twice).
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen2.5-Coder-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b": 999_885_952,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


def job(**changed: Any) -> ResolvedJob:
    """A 7B model on one pod of four GPUs, and four engines; ``changed``: parts of the spec."""
    spec: dict[str, Any] = {
        "model": {"source": QWEN},
        "data": {"train": {"source": "d.jsonl"}, "answer": "answer", "maxPromptTokens": 1024},
        "algorithm": {"preset": "grpo"},
        "reward": {"functions": [{"type": "exactMatch"}]},
        "placement": "separate",
        "rollout": {"replicas": 4, "gpusPerReplica": 1, "maxResponseTokens": 3072},
        "trainer": {"gpusPerReplica": 4, "activationCheckpointing": True, "microBatchTokens": 8192},
        "stop": {"steps": 1},
    }
    for name, value in changed.items():
        spec[name] = spec.get(name, {}) | value if isinstance(value, dict) else value
    made, violations = check(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "test"}, "spec": spec}
    )
    assert not violations
    assert made is not None
    return resolve(made)


def plan(made: ResolvedJob, memory: int | None) -> MemoryPlan:
    shape = known_shape(made.spec.model.source or "")
    assert shape is not None
    return plan_memory(made, shape, memory)


def test_every_known_model_has_as_many_parameters_as_published() -> None:
    counted = {}
    for name in known_models():
        shape = known_shape(name)
        assert shape is not None
        counted[name] = shape.parameters
    assert counted == PUBLISHED


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("hf://Qwen/Qwen3-4B-Base", "qwen3"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2"),
        ("google/gemma-2-9b-it", "gemma2"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
        ("s3://models/Qwen2.5-7B-Instruct", "qwen2"),
        ("somebody/Qwen2.5-7B", None),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", None),
    ],
)
def test_models_trained_further_have_their_base_models_shape(source: str, family: str | None) -> None:
    shape = known_shape(source)
    assert (None if shape is None else shape.family) == family


def test_a_configuration_of_another_family_or_without_a_size_is_refused_by_name() -> None:
    with pytest.raises(UnknownShapeError, match="'gpt_oss' is not one of llama, mistral, qwen2, qwen3, gemma2"):
        ModelShape.from_config({"model_type": "gpt_oss"})
    with pytest.raises(UnknownShapeError, match="some layers of this qwen3_moe have no experts"):
        ModelShape.from_config(
            {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 2, "mlp_only_layers": [0]}
        )
    with pytest.raises(UnknownShapeError, match="hidden_size is None"):
        ModelShape.from_config({"model_type": "llama"})


def test_gemma_2_has_both_caps_and_one_matrix_for_words_unless_its_file_says_otherwise() -> None:
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), 64)
    config = {"model_type": "gemma2", "vocab_size": 64, "head_dim": 32, **sizes}
    plain = ModelShape.from_config(config)
    assert (plain.tied, plain.caps_scores, plain.caps_logits, plain.head_width) == (True, True, True, 32)
    without = ModelShape.from_config(config | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (without.caps_scores, without.caps_logits) == (False, False)
    third = ModelShape.from_config(config | {"model_type": "gemma3_text", "tie_word_embeddings": False})
    assert (third.tied, third.caps_scores, third.caps_logits) == (False, False, False)


def test_a_random_model_with_the_tokenizer_of_another_has_no_known_vocabulary() -> None:
    assert ModelShape.of_random(RandomModel.model_validate({"tokenizer": {"source": "m"}})) is None


@pytest.mark.parametrize(
    ("label", "gibibytes"),
    [("NVIDIA-H100-80GB-HBM3", 79.6), ("Tesla-T4", 15.0), ("NVIDIA A100-SXM4-40GB", 40.0), ("NVIDIA-L4-SHARED", 22.5)],
)
def test_a_gpu_is_known_by_the_label_of_its_node(label: str, gibibytes: float) -> None:
    size = product_memory(label)
    assert size is not None
    assert size / GIB == pytest.approx(gibibytes, abs=0.06)
    assert product_memory("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb") is None


@pytest.mark.parametrize(
    ("quantity", "size"),
    [("80Gi", 80 * GIB), ("64G", 64 * 10**9), ("1.5Ki", 1536), ("1e3", 1000), ("500m", 0), ("7", 7), ("x", None)],
)
def test_quantities_are_bytes(quantity: str, size: int | None) -> None:
    assert bytes_of(quantity) == size


# --- engines ----------------------------------------------------------------------------------------------------------


def engine(**options: Any) -> EngineGpu:
    shape = known_shape(QWEN)
    assert shape is not None
    return EngineGpu(shape, 2, context=4096, sequences=256, **options)


def test_an_engine_has_all_experts_of_a_mixture_divided_and_its_routers_whole() -> None:
    shape = known_shape("Qwen/Qwen3-30B-A3B")
    assert shape is not None
    one, four = (EngineGpu(shape, 2, context=4096, sequences=256, tensor=tensor) for tensor in (1, 4))
    assert one.weights == 2 * PUBLISHED["Qwen/Qwen3-30B-A3B"]
    # On each of four GPUs: of 48 layers the routers, the norms of the stream, and those of a head; and the last norm.
    repeated = 2 * (48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048)
    assert 4 * four.weights == one.weights + 3 * repeated


def test_an_engines_weights_and_cache_are_those_of_its_gpu() -> None:
    whole = engine()
    assert whole.weights == 2 * PUBLISHED["Qwen/Qwen2.5-7B"]
    # 28 layers, 4 heads of 128, keys and values, two bytes each.
    assert whole.token == 28 * 2 * 4 * 128 * 2 == 56 * 1024
    assert engine(cache_itemsize=1).token == whole.token / 2
    # Norms, the output projection's none, and biases of 28 layers are on both GPUs.
    repeated = 2 * (28 * (2 * 3584 + 3584 + 2 * 512) + 3584)
    assert 2 * engine(tensor=2).weights == whole.weights + repeated
    assert engine(tensor=2).token == whole.token / 2
    # Four key heads are one each on four GPUs, and still one on eight.
    assert engine(tensor=8).token == engine(tensor=4).token == whole.token / 4


def test_the_cache_takes_what_is_left_of_the_engines_share() -> None:
    made = engine(memory=80 * GIB, share=0.5)
    assert made.cache == 40 * GIB - made.weights - made.work - made.graphs
    assert made.longest_at_once == pytest.approx(made.cache / (4096 * 56 * 1024))
    assert made.sampling().total == 40 * GIB
    assert engine(memory=80 * GIB, eager=True).graphs == 0
    assert engine(memory=80 * GIB, cache_bytes=GIB).cache == GIB


def test_an_engine_whose_cache_holds_no_sequence_does_not_fit_whatever_is_free_besides() -> None:
    made = job(rollout={"replicas": 4, "gpusPerReplica": 1, "engineArgs": {"gpu_memory_utilization": 0.2}})
    found = plan(made, 80 * GIB)
    (device,) = [device for device in found.devices if device.name == "engine GPU"]
    assert device.peak.total < 80 * GIB / 2
    assert device.missing > 0
    assert device.notes == ("the KV cache is too small for one sequence of 4096 tokens, so vLLM would not start",)
    assert [str(setting) for setting in found.remedies["engine GPU"].settings] == [
        "spec.rollout.engineArgs.gpu_memory_utilization: 0.9"
    ]


# --- a shared GPU -----------------------------------------------------------------------------------------------------


def colocated(**rollout: Any) -> MemoryPlan:
    made = job(placement="colocated", rollout={"replicas": None, "gpusPerReplica": 0, **rollout})
    return plan(made, 80 * GIB)


def test_learner_and_engine_are_never_on_a_shared_gpu_together() -> None:
    (shared, _) = colocated(engineArgs={"gpu_memory_utilization": 0.6}).devices
    assert shared.name == "shared GPU"
    assert shared.count == 4
    moments = {moment.name: moment.parts for moment in shared.moments}
    assert parts.KV_CACHE not in moments["actor: layer backward"]
    assert parts.ENGINE_WEIGHTS not in moments["actor: layer backward"]
    assert parts.OPTIMIZER not in moments["publication"]
    assert parts.KV_CACHE not in moments["publication"]
    assert {parts.MASTERS, parts.ENGINE_WEIGHTS, parts.BUCKETS} <= set(moments["publication"])
    assert parts.MASTERS not in moments["sampling"]


def test_an_engine_that_never_sleeps_is_beside_the_learner_and_sleep_makes_it_fit() -> None:
    awake = colocated(freeCacheEngine=False, engineArgs={"gpu_memory_utilization": 0.9})
    moments = {moment.name: moment.parts for moment in awake.devices[0].moments}
    assert {parts.KV_CACHE, parts.OPTIMIZER} <= set(moments["actor: layer backward"])
    assert not awake.fits
    assert str(awake.remedies["shared GPU"]) == "spec.rollout.freeCacheEngine: true"


def test_at_rest_the_whole_learner_is_in_host_memory() -> None:
    found = colocated(engineArgs={"gpu_memory_utilization": 0.6})
    host = {moment.name: moment.total for moment in found.devices[1].moments}
    # Four bytes and two moments of four, over four GPUs of one pod. To begin with, each rank has read the embedding and
    # the output matrix, which are more than a layer.
    assert host["at rest"] == pytest.approx((12 + 2) * PUBLISHED["Qwen/Qwen2.5-7B"], rel=1e-3)
    assert host["start"] == 4 * 2 * (2 * 152064 * 3584 + 3584)


def test_what_waits_in_host_memory_is_not_on_the_gpu() -> None:
    """The copy of a version's first weights, and with offload what has nothing to do."""
    parameters = PUBLISHED["Qwen/Qwen2.5-7B"]
    kl = {"preset": "grpo", "kl": {"inLoss": {"coefficient": 0.001}}}
    trainer = {"gpusPerReplica": 4, "offload": True, "activationCheckpointing": True}

    def at_rest(**changed: Any) -> int:
        host = plan(job(**changed), None).devices[-1]
        return next((moment.total for moment in host.moments if moment.name == "at rest"), 0)

    assert at_rest() == 0
    assert at_rest(pipeline={"mode": "fullyAsync"}) == pytest.approx(4 * parameters, rel=1e-3)
    # Moments in float32, and the reference in bfloat16.
    assert at_rest(trainer=trainer, algorithm=kl) == pytest.approx((8 + 2) * parameters, rel=1e-3)
    moments = {
        moment.name: moment.parts for moment in plan(job(trainer=trainer, algorithm=kl), None).devices[0].moments
    }
    assert parts.OPTIMIZER not in moments["score: head"]
    assert parts.REFERENCE in moments["score: head"]
    assert parts.OPTIMIZER in moments["actor: layer backward"]
    assert parts.REFERENCE not in moments["actor: layer backward"]


# --- adapters ---------------------------------------------------------------------------------------------------------


def with_adapter(source: str = QWEN, **changed: Any) -> ResolvedJob:
    lora = {"source": source, "lora": {"rank": 16, "alpha": 16, **changed.pop("lora", {})}}
    return job(model=lora, trainer={"gpusPerReplica": 1, "microBatchTokens": 4096}, **changed)


def test_grpo_with_an_adapter_of_a_small_model_fits_on_one_card_of_24_gb_and_all_of_7b_does_not() -> None:
    shared = {"placement": "colocated", "rollout": {"replicas": None, "gpusPerReplica": 0, "engineArgs": SHARE}}
    lora = job(model={"source": SMALL, "lora": {"rank": 32}}, trainer={"gpusPerReplica": 1}, **shared)
    card = product_memory("NVIDIA GeForce RTX 4090")
    assert card is not None
    assert plan(lora, card).fits
    assert not plan(job(trainer={"gpusPerReplica": 1}, **shared), card).fits


def test_beside_an_adapter_the_model_is_there_once_without_masters_moments_and_a_reference() -> None:
    """For each number of the model two bytes, for each of the adapter's 4 and two moments of 4."""
    kl = {"preset": "grpo", "kl": {"inLoss": {"coefficient": 0.001}}}
    rank = plan(with_adapter(algorithm=kl), 80 * GIB).inputs.rank()
    # As peft says of all linear layers at rank 16: "trainable params: 40,370,176".
    assert rank.at_rest() == {
        parts.FROZEN: 2 * PUBLISHED["Qwen/Qwen2.5-7B"],
        parts.MASTERS: 4 * 40_370_176,
        parts.OPTIMIZER: 8 * 40_370_176,
        parts.REFERENCE: 0,
    }
    # Neither the embedding nor the output matrix has a gradient.
    assert "actor: sum of the outer gradients" not in {moment.name for moment in rank.all()}


def test_an_adapter_travels_merged_or_by_itself() -> None:
    matrix = 3584 * 18944
    embedding = 2 * 152064 * 3584
    buckets = {}
    for publish in ("merged", "adapter"):
        trainer, engine, host = plan(with_adapter(lora={"publish": publish}), 80 * GIB).devices
        moments = {moment.name: moment.parts for moment in trainer.moments}
        buckets[publish] = moments["publication"][parts.BUCKETS]
        slot = engine.peak.parts.get(parts.ENGINE_ADAPTER, 0)
        assert slot == (2 * 40_370_176 if publish == "adapter" else 0)
        # Each rank reads the whole model before it is cut up.
        assert host.peak.total == 2 * PUBLISHED["Qwen/Qwen2.5-7B"]
    # The whole embedding and what travels of it, or a product in float64 and float32 beside a bucket.
    bucket = plan(with_adapter(), None).inputs.bucket
    assert buckets["merged"] == max(2 * embedding, 12 * matrix + bucket)
    assert buckets["adapter"] == 2 * 16 * 18944 + max(bucket, 2 * 16 * 18944)


def test_an_engine_has_room_for_an_adapter_of_the_next_size_of_its_kernels() -> None:
    for rank, size in ((1, 1), (9, 16), (16, 16), (33, 64)):
        made = engine(memory=80 * GIB, adapter=AdapterShape(rank, ("q_proj",), alone=True))
        assert made.slot == 2 * size * 40_370_176 // 16
        assert made.sampling().total == engine(memory=80 * GIB).sampling().total


# --- what would help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gibibytes", [20, 24, 32, 40, 48, 64])
def test_the_change_makes_it_fit_and_no_cheaper_one_does(gibibytes: int) -> None:
    made = job(trainer={"gpusPerReplica": 4, "activationCheckpointing": False, "microBatchTokens": 16384})
    found = plan(made, gibibytes * GIB)
    change = found.remedies["trainer GPU"]

    def lacks(name: str, inputs: MemoryInputs) -> bool:
        return any(device.missing for device in devices(inputs) if device.name == name)

    assert lacks("trainer GPU", found.inputs)
    assert not lacks("trainer GPU", change.inputs)
    earlier = []
    for candidate in changes(found.inputs):
        if candidate == change:
            break
        earlier.append(candidate)
    assert all(lacks("trainer GPU", candidate.inputs) for candidate in earlier)


@pytest.mark.parametrize(
    ("trainer", "gibibytes", "more"),
    [
        # No saving is enough on four GPUs; on eight one or two are.
        ({"activationCheckpointing": False, "microBatchTokens": 16384}, 40,
         {"activationCheckpointing": True, "microBatchTokens": 4096, "gpusPerReplica": 8}),
        # Two savings together are enough on the GPUs that are there.
        ({"activationCheckpointing": False, "microBatchTokens": 32768}, 64,
         {"activationCheckpointing": True, "microBatchTokens": 4096}),
    ],
)  # fmt: skip
def test_savings_together_come_before_more_gpus_and_few_gpus_with_savings_before_many(
    trainer: dict[str, Any], gibibytes: int, more: dict[str, Any]
) -> None:
    before = {"gpusPerReplica": 4} | trainer
    found = plan(job(trainer=before, algorithm={"preset": "ppo"}), gibibytes * GIB)
    change = found.remedies["trainer GPU"]
    assert plan(job(trainer=before | more, algorithm={"preset": "ppo"}), gibibytes * GIB).fits
    assert change.inputs.ranks == more.get("gpusPerReplica", 4)
    assert {setting.path.rpartition(".")[2] for setting in change.settings} <= {*more, "shard"}


def test_what_takes_no_device_comes_first_and_then_fewer_before_more() -> None:
    made = job(trainer={"gpusPerReplica": 4, "activationCheckpointing": False, "microBatchTokens": 16384})
    ranks = [change.inputs.ranks for change in changes(plan(made, 40 * GIB).inputs)]
    assert ranks == sorted(ranks)
    assert {*ranks} == {4, 8, 16, 32, 64, 128, 256, 512, 1024}


LAYOUTS: list[dict[str, Any]] = [
    {"gpusPerReplica": 4},
    {"gpusPerReplica": 4, "replicas": 2, "parallelism": {"shard": 4, "replicate": 2}},
    {"gpusPerReplica": 8, "parallelism": {"shard": 2, "replicate": 2, "context": 2}},
    {"gpusPerReplica": 8, "parallelism": {"replicate": 2, "context": 2, "tensor": 2}},
]


@pytest.mark.parametrize("trainer", LAYOUTS)
def test_a_changed_file_is_valid_and_is_what_the_change_was_judged_by(trainer: dict[str, Any]) -> None:
    before = {"trainer": trainer | {"microBatchTokens": 16384}, "rollout": {"gpusPerReplica": 1, "replicas": 4}}
    shape = known_shape(QWEN)
    assert shape is not None
    candidates = [*changes(plan(job(**before), 16 * GIB).inputs)]
    assert len(candidates) > 60
    for change in (*candidates[:40], *candidates[40::9]):
        written = before
        for setting in change.settings:
            value: Any = yaml.safe_load(setting.value)
            for name in reversed(setting.path.removeprefix("spec.").split(".")):
                value = {name: value}
            written = merged(written, value)
        # What a plan is made of; a plan of each would search for changes once more.
        assert MemoryInputs.of(job(**written), shape, 16 * GIB) == change.inputs, str(change)


def test_more_ranks_hold_less_each() -> None:
    inputs = plan(job(), 80 * GIB).inputs
    few, many = (devices(replace(inputs, trainer_pods=pods))[0] for pods in (1, 4))
    assert (few.count, many.count) == (4, 16)
    for part in (parts.MASTERS, parts.OPTIMIZER):
        assert many.peak.parts[part] == pytest.approx(few.peak.parts[part] / 4, rel=1e-3)


# --- notes ------------------------------------------------------------------------------------------------------------


def said(made: ResolvedJob) -> list[str]:
    return [str(note) for note in notes(made)]


def test_validate_notes_what_does_not_fit_on_the_gpus_that_the_job_asks_for() -> None:
    small = {"pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"}}}
    (note,) = said(job(trainer={"gpusPerReplica": 4, "activationCheckpointing": True, **small}))
    assert note.startswith("spec.trainer.gpusPerReplica: trainer GPU: ")
    assert "but has only 22.5; set spec.trainer." in note
    (note,) = said(job(rollout={"gpusPerReplica": 1, "pod": {"nodeSelector": {"nvidia.com/gpu.memory": "15360"}}}))
    assert note.startswith("spec.rollout.gpusPerReplica: engine GPU: the KV cache is too small for one sequence")


def test_validate_notes_a_pod_whose_ranks_cannot_read_the_model() -> None:
    pod = {"resources": {"limits": {"memory": "4Gi"}}}
    (note,) = said(job(trainer={"gpusPerReplica": 4, "pod": pod}))
    assert note.startswith("spec.trainer.pod.resources.limits.memory: trainer pod's host memory: needs 8.12 GiB")
    assert "set spec.trainer.pod.resources.limits.memory: 9Gi" in note
    assert said(job(trainer={"gpusPerReplica": 4, "pod": {"resources": {"limits": {"memory": "16Gi"}}}})) == []


def test_validate_notes_engines_on_cpus_beside_a_trainer_on_gpus() -> None:
    (note,) = said(job(rollout={"replicas": 4, "gpusPerReplica": 0}))
    assert note.startswith("spec.rollout.gpusPerReplica: engines sample on CPUs, although the trainer has GPUs")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"trainer": {"backend": "mine:Backend"}}, "spec.trainer.backend: the memory of mine:Backend"),
    ],
)
def test_of_what_cannot_be_told_nothing_is_said(changed: dict[str, Any], named: str) -> None:
    pod = {"nodeSelector": {"nvidia.com/gpu.memory": "1024"}}
    made = job(**{**changed, "trainer": {"gpusPerReplica": 4, "pod": pod, **changed.get("trainer", {})}})
    assert (untold(made) or "").startswith(named)
    assert said(made) == []
    plain = job(trainer={"gpusPerReplica": 4, "pod": pod})
    assert untold(plain) is None
    assert said(plain)
    lora = {"source": QWEN, "lora": {"rank": 8}}
    on_cpus = job(model=lora, trainer={"gpusPerReplica": 0}, rollout={"gpusPerReplica": 0})
    assert (untold(on_cpus) or "").startswith("spec.model.lora: the CPU memory of adapters")
    assert untold(job(model=lora)) is None
    gemma = known_shape("google/gemma-2-2b-it")
    assert (untold(on_cpus, gemma) or "").startswith("spec.model: the CPU memory of gemma2 layers")
    assert untold(job(), gemma) is None


CRITIC_3B = {"algorithm": {"preset": "ppo", "critic": {"model": {"source": "meta-llama/Llama-3.2-3B"}}}}


def test_a_critic_that_starts_from_another_model_is_counted_by_its_own_parameters() -> None:
    shape, critic = known_shape(QWEN), known_shape("meta-llama/Llama-3.2-3B")
    assert shape is not None
    assert critic is not None
    found = plan_memory(job(**CRITIC_3B), shape, 80 << 30, critic_shape=critic)
    (trainer,) = (device for device in found.devices if device.name == "trainer GPU")
    kept = next(moment for moment in trainer.moments if moment.name == "publication").parts[parts.CRITIC]
    # Masters and two moments in float32 of Llama 3.2 3B, whose output matrix is its embedding, with a value head; the
    # shards of four ranks are rounded up, tensor by tensor.
    assert kept == pytest.approx(12 * (3_212_749_824 + 3072 + 1) / 4, rel=1e-4)
    # Ranks that share a row or a layer divide the heads of both models: 28 of Qwen 2.5 7B, 24 of the critic.
    narrow = plan_memory(job(**CRITIC_3B), shape, 16 << 30, critic_shape=critic)
    for change in narrow.remedies.values():
        assert 24 % (change.inputs.context_ranks * change.inputs.tensor_ranks) == 0


def test_validate_notes_a_critic_that_is_too_large_and_nothing_of_one_that_it_does_not_know() -> None:
    on = {"gpusPerReplica": 4, "pod": {"nodeSelector": {"nvidia.com/gpu.memory": "46068"}}}
    passes = {"activationCheckpointing": True, "microBatchTokens": 8192}
    model = {"source": "Qwen/Qwen2.5-0.5B-Instruct"}

    def with_critic(source: str) -> ResolvedJob:
        critic = {"preset": "ppo", "critic": {"model": {"source": source}}}
        return job(model=model, algorithm=critic, trainer={**on, **passes})

    assert said(with_critic("Qwen/Qwen2.5-1.5B-Instruct")) == []
    (note,) = said(with_critic("Qwen/Qwen2.5-14B-Instruct"))
    assert note.startswith("spec.trainer.gpusPerReplica: trainer GPU: ")
    assert said(with_critic("org/scores")) == []


def test_nothing_is_noted_where_the_job_says_no_sizes_or_the_model_is_not_known() -> None:
    assert said(job()) == []
    assert said(job(model={"source": "somebody/something"})) == []
