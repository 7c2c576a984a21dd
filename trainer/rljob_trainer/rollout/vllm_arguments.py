"""What vLLM is told before it starts: variables of its environment, and its engine's arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_trainer.errors import EngineError
from rljob_trainer.models.weights import layer_matrices, stored_tensors

_OWN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
_SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
_INVARIANT_FROM = (8, 0)
"""The least compute capability of vLLM's batch-invariant kernels, by its page on them (0.32); vLLM does not look."""
_CPU_ENVIRONMENT = {
    # No compilation: 3 s to start instead of 30.
    "TORCH_COMPILE_DISABLE": "1",
    # Ray and the job decide about cores; a second thread on a busy machine makes everything slower.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_GPU_ENVIRONMENT = {
    # FlashInfer compiles its kernels when they are first used, with an nvcc that it looks for in CUDA_HOME, on PATH and
    # in /usr/local/cuda: the one of the image is a package's (nvidia/cu13/bin), and so not found. Its sampler could
    # serve no request of ours: it tells no log-probs after top-k and top-p, and has no seeds. Between several GPUs
    # vLLM has sums of its own.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
_CPU_ARGUMENTS: Mapping[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    # A prompt begun in parts draws tokens that do not count, and vLLM sets the request's generator back afterwards.
    # Generators of the CPU have no offset to go back by, and the engine fails ("CPU Generator does not use offset").
    "enable_chunked_prefill": False,
}
_GPU_ARGUMENTS: Mapping[str, Any] = {"enable_sleep_mode": True}
_GPU_BATCHED_TOKENS = 8192
"""Prompt tokens that a step reads at most. Here vLLM takes 2,048 unless told, too few to keep a GPU busy."""
_SCORED_BESIDE = 4
"""Sequences that can be scored at once while requests are running."""
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def environment(told: Mapping[str, str], *, on_cpu: bool, start_seconds: float, tells_experts: bool) -> dict[str, str]:
    """The variables that vLLM needs, read when it is imported, beside those in ``told``, which win.

    Raises ``EngineError`` where these have vLLM choose where its core runs, or take a model runner that cannot do what
    is asked for.
    """
    if told.get(_OWN_PROCESS, "0") != "0":
        raise EngineError(
            f"vLLM engine: {_OWN_PROCESS} is set, but it does not control where the core runs: remove it from the "
            "engine's environment (the shell's or the image's), and set rollout.multiprocessing: true to run vLLM's "
            "core in its own process"
        )
    wanted = {
        # Where the core is ``vllm_core.py`` says; a CPU's only worker would get a process of its own beside that.
        _OWN_PROCESS: "0",
        # How long a core's own process may load its model: as long as the whole engine may, which is told otherwise.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_seconds)),
        **(_CPU_ENVIRONMENT if on_cpu else _GPU_ENVIRONMENT),
    }
    if tells_experts and not on_cpu:
        # By vLLM's second model runner, which no CPU has (``vllm_routing.py``).
        if told.get(_SECOND_RUNNER) == "0":
            raise EngineError(
                f"vLLM engine: routing replay on a GPU needs vLLM's second model runner, but {_SECOND_RUNNER} is 0: "
                "remove it from rollout.env"
            )
        wanted[_SECOND_RUNNER] = "1"
    return {name: value for name, value in wanted.items() if name not in told}


def refuse_variant_kernels(told: Mapping[str, str], capability: tuple[int, int] | None) -> None:
    """Raises ``EngineError`` if the variables ask for log-probs that do not depend on the batch, which a GPU of this
    compute capability has no kernels for. None: it is not known."""
    if told.get(_BATCH_INVARIANT, "0") == "0" or capability is None or capability >= _INVARIANT_FROM:
        return
    needed, has = (".".join(map(str, version)) for version in (_INVARIANT_FROM, capability))
    raise EngineError(
        f"vLLM engine: deterministic: true needs vLLM's batch-invariant mode ({_BATCH_INVARIANT}), which needs a "
        f"GPU of compute capability {needed} (A100) or higher, but this one has {has}: use nodes with newer GPUs "
        "(pod.nodeSelector), or remove deterministic"
    )


def model_runner(config: Any) -> str:
    """Which of vLLM's two model runners a ``VllmConfig`` has: "V1" or "V2". vLLM takes the second unless
    ``VLLM_USE_V2_MODEL_RUNNER`` is 0, there is no Triton (its builds for CPUs), or something is asked for that the
    second cannot do."""
    return "V2" if config.use_v2_model_runner else "V1"


def engine_arguments(
    folder: str | Path,
    *,
    on_cpu: bool,
    dtype: str,
    max_concurrent: int,
    max_context: int | None,
    tensor_parallel: int,
    seed: int,
    keep_cache: bool,
    adapter_rank: int | None,
    tells_experts: bool,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs``, but for how weights come. ``given`` win over everything else; the
    others are those of ``VLLMEngine``."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": dtype,
        "max_num_seqs": max_concurrent + (_SCORED_BESIDE if keep_cache else 0),
        "max_model_len": max_context,
        "tensor_parallel_size": tensor_parallel,
        # In a placement group, and on other occasions, vLLM would have Ray start the workers of several GPUs.
        "distributed_executor_backend": "mp" if tensor_parallel > 1 else None,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **(_CPU_ARGUMENTS if on_cpu else _GPU_ARGUMENTS),
    }
    if not on_cpu:
        # vLLM wants room for a token of every request.
        arguments["max_num_batched_tokens"] = max(_GPU_BATCHED_TOKENS, arguments["max_num_seqs"])
    if adapter_rank is not None:
        # The least of the sizes that vLLM's kernels are made for.
        size = next(rank for rank in _ADAPTER_RANKS if rank >= adapter_rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": size}
        # Not the output matrix: beside an adapter vLLM 0.32 fails to compute a prompt's log-probs.
        layers = layer_matrices(stored_tensors(Path(folder)))
        arguments["lora_target_modules"] = sorted({name.rpartition(".")[2] for name in layers})
    if tells_experts and not on_cpu:
        arguments["enable_return_routed_experts"] = True
    return {**arguments, **given}
