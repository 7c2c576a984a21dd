"""How a run's ranks and engines share a host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml
from tiny_job import copy_job

from rljob_api import load_jobs, resolve
from rljob_trainer.driver.engines import engine_options, learner_lanes, learner_options

SYNC = {"pipeline": {"mode": "sync"}, "placement": "separate"}
ONE_STEP_OFF = {"pipeline": {"mode": "oneStepOff"}, "placement": "separate"}


@pytest.mark.parametrize(
    ("spec", "cores", "lanes"),
    [
        pytest.param(SYNC, 2, 2, id="the engine waits while an update runs"),
        pytest.param(SYNC, 1, 1, id="a single core"),
        pytest.param(ONE_STEP_OFF, 2, 1, id="the second core is the engine's"),
        pytest.param(ONE_STEP_OFF, 3, 2, id="a core for the engine and two for the rank"),
        pytest.param(ONE_STEP_OFF | {"rollout": {"replicas": 2, "maxResponseTokens": 3}}, 3, 1, id="two engines"),
        pytest.param(ONE_STEP_OFF, None, 2, id="hosts of their own"),
        pytest.param(SYNC | {"trainer": {"env": {"OMP_NUM_THREADS": "1"}}}, 8, 1, id="told to use one thread"),
    ],
)
def test_an_update_takes_a_second_core_only_where_it_is_free(
    spec: dict[str, object], cores: int | None, lanes: int
) -> None:
    [job] = load_jobs(yaml.safe_dump(copy_job(**spec)))
    assert learner_lanes(resolve(job).spec, cores) == lanes


def test_ranks_on_gpus_alone_have_an_allocator_that_engines_cannot_have_while_they_sleep() -> None:
    def environment(options: object) -> object:
        variables = options["runtime_env"]["env_vars"]  # type: ignore[index]
        return variables.get("PYTORCH_ALLOC_CONF"), variables.get("PYTORCH_CUDA_ALLOC_CONF")

    for trainer, expected in (
        ({"gpusPerReplica": 2}, ("expandable_segments:True", None)),
        ({"gpusPerReplica": 2, "env": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}}, ("max_split_size_mb:64", None)),
        # Under its other name, which would count less than ours.
        (
            {"gpusPerReplica": 2, "env": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}},
            (None, "max_split_size_mb:64"),
        ),
        ({}, (None, None)),
    ):
        on_gpus = "gpusPerReplica" in trainer
        for told in ({}, {"PYTORCH_ALLOC_CONF": "a"}, {"PYTORCH_CUDA_ALLOC_CONF": "a"}):
            rollout = {"engine": "vllm", "maxResponseTokens": 3, "env": told}
            [job] = load_jobs(yaml.safe_dump(copy_job(placement="colocated", rollout=rollout, trainer=trainer)))
            spec = resolve(job).spec
            assert environment(learner_options(spec).resources) == expected
            # The pod in which both live has the variables of trainer.env: what is set here takes their place.
            said = "a" if told else ""
            by_name = (told.get("PYTORCH_ALLOC_CONF"), told.get("PYTORCH_CUDA_ALLOC_CONF"))
            assert environment(engine_options(spec, False, None, "0")) == ((said, said) if on_gpus else by_name)


def test_torch_takes_an_empty_setting_of_its_allocator() -> None:
    program = "import torch; torch._C._accelerator_setAllocatorSettings(''); print(torch.ones(2).sum().item())"
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert said.stdout == "2.0\n", said.stderr


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"compile": True, "gpusPerReplica": 8, "pod": {"resources": {"requests": {"cpu": "36"}}}}, "4"),
        ({"compile": True, "gpusPerReplica": 8, "pod": {"resources": {"limits": {"cpu": "4"}}}}, "1"),
        ({"compile": True, "pod": {"resources": {"requests": {"cpu": "2500m"}}}}, "3"),
        ({"compile": True}, "1"),
        ({"compile": True, "env": {"TORCHINDUCTOR_COMPILE_THREADS": "5"}}, "5"),
        ({"pod": {"resources": {"requests": {"cpu": "36"}}}}, None),
    ],
)
def test_ranks_share_their_pod_s_cpus_to_compile_with(trainer: dict[str, object], expected: str | None) -> None:
    [job] = load_jobs(yaml.safe_dump(copy_job(trainer=trainer)))
    variables = learner_options(resolve(job).spec).resources["runtime_env"]["env_vars"]
    assert variables.get("TORCHINDUCTOR_COMPILE_THREADS") == expected


def test_collectives_of_the_ranks_end_later_than_every_wait_of_ours() -> None:
    """torch ends the process of a rank whose collective is late: whoever waits for it must have spoken by then."""
    [job] = load_jobs(yaml.safe_dump(copy_job(deadlines={"startSeconds": 900, "progressSeconds": 600})))
    options = learner_options(resolve(job).spec)
    assert options.call_seconds == 600
    assert options.collective_seconds > 900
    assert options.collective_seconds > 600 + 30 + 10


def test_one_setting_makes_trainer_and_engines_on_gpus_deterministic() -> None:
    def environments(**sections: object) -> tuple[set[str], set[str]]:
        rollout = {"engine": "vllm", "maxResponseTokens": 3}
        [job] = load_jobs(yaml.safe_dump(copy_job(placement="colocated", rollout=rollout, **sections)))
        spec = resolve(job).spec
        options = learner_options(spec).resources, engine_options(spec, False, None, "0")
        rank, engine = (set(part["runtime_env"]["env_vars"].items()) for part in options)
        return rank, engine

    on_gpu = {"trainer": {"gpusPerReplica": 1}}
    asked = environments(deterministic=True, **on_gpu)
    plain = environments(**on_gpu)
    assert [part - before for part, before in zip(asked, plain, strict=True)] == [
        {("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("TORCHINDUCTOR_DETERMINISTIC", "1")},
        {("VLLM_BATCH_INVARIANT", "1")},
    ]
    # CPUs are as they are.
    assert environments(deterministic=True) == environments()
