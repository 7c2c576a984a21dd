"""What vLLM is told before it starts, for devices that are not here as well."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rljob_trainer.errors import EngineError
from rljob_trainer.rollout.vllm_arguments import engine_arguments, environment, refuse_variant_kernels

pytestmark = pytest.mark.vllm


def arguments_of(device: str, given: dict[str, Any] | None = None, **changes: Any) -> Any:
    """As vLLM understands them."""
    from vllm import EngineArgs

    others: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_concurrent": 256,
        "max_context": 4096,
        "tensor_parallel": 1,
        "seed": 0,
        "keep_cache": False,
        "adapter_rank": None,
        "tells_experts": False,
    }
    on_cpu = device == "cpu"
    return EngineArgs(**engine_arguments(Path("model"), on_cpu=on_cpu, given=given or {}, **(others | changes)))


@pytest.mark.parametrize(
    ("concurrent", "keep_cache", "expected"),
    [(1, False, 8192), (1024, True, 8192), (8192, False, 8192), (8192, True, 8196), (10_000, False, 10_000)],
)
def test_a_gpu_reads_8192_prompt_tokens_a_step_or_one_of_each_request(
    concurrent: int, keep_cache: bool, expected: int
) -> None:
    arguments = arguments_of("cuda", max_concurrent=concurrent, keep_cache=keep_cache)
    assert arguments.max_num_batched_tokens == expected
    # vLLM refuses a step that has not room for them all.
    assert arguments.max_num_seqs <= expected


def test_a_job_s_own_argument_wins() -> None:
    assert arguments_of("cuda", {"max_num_batched_tokens": 16384}).max_num_batched_tokens == 16384


@pytest.mark.parametrize(("tensor", "expected"), [(1, None), (2, "mp")])
def test_workers_of_several_gpus_are_processes_of_the_engine_and_not_of_ray(tensor: int, expected: str | None) -> None:
    """vLLM would choose Ray's in a placement group, which has no GPU left for them."""
    assert arguments_of("cuda", tensor_parallel=tensor).distributed_executor_backend == expected


def test_on_a_cpu_vllm_chooses() -> None:
    assert arguments_of("cpu").max_num_batched_tokens is None


@pytest.mark.parametrize("said", ["1", "true"])
def test_a_job_says_where_the_core_runs_and_not_a_variable(said: str) -> None:
    with pytest.raises(EngineError, match=r"VLLM_ENABLE_V1_MULTIPROCESSING is set.*rollout\.multiprocessing: true"):
        environment({"VLLM_ENABLE_V1_MULTIPROCESSING": said}, on_cpu=True, start_seconds=600, tells_experts=False)


def test_variables_that_are_set_stay_and_a_core_may_load_as_long_as_engines_may_start() -> None:
    told = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "0", "HOME": "/"}
    found = environment(told, on_cpu=True, start_seconds=1800.5, tells_experts=True)
    assert found == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENGINE_READY_TIMEOUT_S": "1801"}
    found = environment({}, on_cpu=False, start_seconds=60, tells_experts=True)
    assert found == {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ENGINE_READY_TIMEOUT_S": "60",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def test_an_engine_refuses_the_variable(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    monkeypatch.setattr(VLLMEngine, "_open", False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    for own_process in (False, True):
        with pytest.raises(EngineError, match=r"rollout\.multiprocessing"):
            VLLMEngine(llama_folder, own_process=own_process)


@pytest.mark.parametrize(
    ("said", "capability"), [("1", (8, 0)), ("1", (12, 0)), ("1", None), ("0", (7, 5)), (None, (7, 0))]
)
def test_a_gpu_with_batch_invariant_kernels_or_without_need_of_them_is_taken(
    said: str | None, capability: tuple[int, int] | None
) -> None:
    refuse_variant_kernels({} if said is None else {"VLLM_BATCH_INVARIANT": said}, capability)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_a_gpu_without_batch_invariant_kernels_is_named_when_the_engine_starts(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """There is no such GPU here: what vLLM's platform says of it is played."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    monkeypatch.setattr(VLLMEngine, "_open", False)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: DeviceCapability(*capability))
    for name in os.environ.keys() | {"VLLM_BATCH_INVARIANT"}:
        if name.startswith("VLLM_"):
            monkeypatch.setenv(name, os.environ.get(name, ""))  # as it was, afterwards
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    had = ".".join(map(str, capability))
    with pytest.raises(EngineError, match=rf"^vLLM engine: deterministic: true .* 8\.0 \(A100\).* has {had}: use"):
        VLLMEngine(llama_folder, device="cuda")


@pytest.mark.parametrize(("home", "found"), [(False, False), (True, True)])
def test_vllm_leaves_flashinfer_s_kernels_alone_where_the_cuda_compiler_is_but_a_package_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: bool, found: bool
) -> None:
    """What the image relies on: FlashInfer is installed there without its precompiled kernels, ninja is on PATH, and
    nvcc below site-packages, which is no place that FlashInfer looks at unless CUDA_HOME says so."""
    from vllm.utils import flashinfer

    programs, toolkit = tmp_path / "bin", tmp_path / "site-packages" / "nvidia" / "cu13"
    for program in (programs / "ninja", toolkit / "bin" / "nvcc"):
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: object() if name == "flashinfer" else None)
    monkeypatch.setattr(flashinfer, "_DEFAULT_CUDA_HOME", str(tmp_path / "none"))
    for name in ("CUDA_HOME", "CUDA_PATH", "VLLM_HAS_FLASHINFER_CUBIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(programs))
    if home:
        monkeypatch.setenv("CUDA_HOME", str(toolkit))
    flashinfer.has_flashinfer_cubin.cache_clear()
    assert flashinfer.has_flashinfer.__wrapped__() is found
