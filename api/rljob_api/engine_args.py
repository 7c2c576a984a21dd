"""The names that ``rollout.engineArgs`` may use: those of vLLM's EngineArgs, less what rljob sets itself.

The list is committed (``engine_args.txt``, written by ``scripts/list_engine_args.py``): validation needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

ENGINE_ARGS = frozenset((files("rljob_api") / "engine_args.txt").read_text(encoding="utf-8").split())

_NO = ""
SET_BY_RLJOB: Mapping[str, str] = {
    "model": "use spec.model.source",
    "served_model_name": _NO,
    "tokenizer": "use spec.model.tokenizer",
    "tokenizer_revision": "use spec.model.revision",
    "skip_tokenizer_init": _NO,
    "revision": "use spec.model.revision",
    "code_revision": "use spec.model.revision",
    "trust_remote_code": "use spec.model.trustRemoteCode",
    "dtype": "use spec.model.dtype",
    "seed": "use spec.seed",
    "max_model_len": "use data.maxPromptTokens and rollout.maxResponseTokens",
    "max_num_seqs": "use rollout.maxConcurrent",
    "tensor_parallel_size": "use rollout.parallelism.tensor",
    "pipeline_parallel_size": "remove it; engines do not support pipeline parallelism",
    "data_parallel_size": "use rollout.replicas",
    "nnodes": "remove it; an engine runs in one pod",
    "node_rank": _NO,
    "master_addr": _NO,
    "master_port": _NO,
    "logprobs_mode": _NO,
    "max_logprobs": _NO,
    "generation_config": _NO,
    "override_generation_config": "use rollout.sampling",
    "logits_processors": "remove it; the trainer cannot reproduce its effect on the probabilities",
    "enable_lora": "use spec.model.lora.publish",
    "max_loras": _NO,
    "max_cpu_loras": _NO,
    "max_lora_rank": "use spec.model.lora.rank",
    "lora_target_modules": "use spec.model.lora.targets",
    "enable_sleep_mode": "use rollout.freeCacheEngine",
    "weight_transfer_config": _NO,
    "hf_token": "use the environment (HF_TOKEN, from a Secret in pod.env)",
}
"""Names that rljob sets, with what to use instead."""
