"""What of a job its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.memory.accelerators import bytes_of, gpu_memory
from rljob_api.memory.adapter import AdapterShape
from rljob_api.memory.engine import DEFAULT_SHARE, EngineGpu
from rljob_api.memory.rows import LargestRow, largest_row
from rljob_api.memory.shape import ModelShape
from rljob_api.memory.trainer import ShardLayout, TrainerRank
from rljob_api.resolved import ResolvedJob
from rljob_api.spec.base import FreeForm

_BATCHED_TOKENS = 8192
_SEQUENCES = {"vllm": 256, "torch": 512}
"""Side by side in one engine, unless told (rljob_trainer/pools/size.py)."""
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """A job's numbers, by the names of its fields. GPUs 0: on CPUs."""

    shape: ModelShape
    adapter: AdapterShape | None
    """What is trained of the model; None: all of it."""
    itemsize: int
    prompt: int
    response: int
    context: int
    """Of engines: validation may have longer responses."""
    siblings: int
    mini_batch: int
    """Sequences of one optimizer step, over all ranks."""
    micro_batch_tokens: int
    checkpointing: bool
    offload: bool
    chunk: int | None
    muon: bool
    critic: bool
    critic_shape: ModelShape | None
    """Of a critic that starts from another model."""
    reference: bool
    full_kl: bool
    deterministic: bool
    keeps_anchor: bool
    """Whether the weights that a version began with wait in host memory (fullyAsync)."""
    trainer_pods: int
    trainer_gpus: int
    """Of one pod."""
    replicate: int
    context_ranks: int
    """Groups of tensor ranks that compute a row together."""
    tensor_ranks: int
    """That compute a layer together."""
    trainer_memory: int | None
    """Of one GPU."""
    trainer_host: int | None
    """The memory limit of a pod of the trainer."""
    colocated: bool
    engines: int
    engine_gpus: int
    """Of one engine."""
    vllm: bool
    tensor: int
    share: float
    batched: int
    sequences: int
    cache_itemsize: int | None
    cache_bytes: int | None
    eager: bool
    engines_sleep: bool
    engine_memory: int | None
    bucket: int

    @classmethod
    def of(
        cls,
        job: ResolvedJob,
        shape: ModelShape,
        memory: int | None = None,
        *,
        critic_shape: ModelShape | None = None,
    ) -> MemoryInputs:
        """``memory``: of every GPU of the job, where its node selectors do not say it or are to be ignored.
        ``critic_shape``: of ``algorithm.critic.model``, where the job has one."""
        spec = job.spec
        trainer, rollout, algorithm = spec.trainer, spec.rollout, spec.algorithm
        on_gpus = trainer.gpus_per_replica > 0
        dtype = spec.model.dtype
        if dtype == "auto":
            dtype = "bfloat16" if on_gpus else "float32"
        colocated = spec.placement == "colocated"
        kl = algorithm.kl.in_loss
        sampled = [rollout.max_response_tokens]
        sampled += [part.sampling.max_response_tokens or 0 for part in spec.data.validation]
        arguments = rollout.engine_args
        sequences = rollout.max_concurrent or _SEQUENCES[rollout.engine]
        trainer_memory = memory or gpu_memory(trainer.pod)
        limit = trainer.pod.resources.limits.get("memory")
        return cls(
            shape=shape,
            adapter=None if spec.model.lora is None else AdapterShape.of(spec.model.lora),
            itemsize=_ITEMSIZE[dtype],
            prompt=spec.data.max_prompt_tokens,
            response=rollout.max_response_tokens,
            context=spec.data.max_prompt_tokens + max(sampled),
            siblings=spec.batch.samples_per_prompt,
            mini_batch=spec.batch.mini_batch_groups * spec.batch.samples_per_prompt,
            micro_batch_tokens=trainer.micro_batch_tokens,
            checkpointing=trainer.activation_checkpointing,
            offload=trainer.offload,
            chunk=trainer.log_prob_chunk_tokens,
            muon=trainer.optimizer.type == "muon",
            critic=algorithm.critic is not None,
            critic_shape=critic_shape,
            reference=algorithm.needs_reference,
            full_kl=kl is not None and kl.kind == "full",
            deterministic=spec.deterministic,
            keeps_anchor=spec.pipeline.mode == "fullyAsync",
            trainer_pods=trainer.replicas,
            trainer_gpus=trainer.gpus_per_replica,
            replicate=trainer.parallelism.replicate,
            context_ranks=trainer.parallelism.context,
            tensor_ranks=trainer.parallelism.tensor,
            trainer_memory=trainer_memory,
            trainer_host=None if limit is None else bytes_of(limit),
            colocated=colocated,
            engines=rollout.replicas,
            engine_gpus=rollout.parallelism.tensor if colocated and on_gpus else rollout.gpus_per_replica,
            vllm=rollout.engine == "vllm",
            tensor=rollout.parallelism.tensor,
            share=_number(arguments, "gpu_memory_utilization") or DEFAULT_SHARE,
            batched=int(_number(arguments, "max_num_batched_tokens") or max(_BATCHED_TOKENS, sequences)),
            sequences=sequences,
            cache_itemsize=1 if str(arguments.get("kv_cache_dtype", "auto")).startswith("fp8") else None,
            cache_bytes=None if (told := _number(arguments, "kv_cache_memory_bytes")) is None else int(told),
            eager=bool(arguments.get("enforce_eager", False)),
            engines_sleep=rollout.free_cache_engine,
            engine_memory=trainer_memory if colocated else memory or gpu_memory(rollout.pod),
            bucket=spec.weights.bucket_megabytes << 20,
        )

    @property
    def ranks(self) -> int:
        return self.trainer_pods * max(1, self.trainer_gpus)

    @property
    def layout(self) -> ShardLayout:
        shard = max(1, self.ranks // (self.replicate * self.context_ranks * self.tensor_ranks))
        return ShardLayout(shard, self.replicate, self.context_ranks, self.tensor_ranks)

    @property
    def trained_shapes(self) -> tuple[ModelShape, ...]:
        """The shapes of all that the ranks train. Ranks that share a row or a layer divide each of them."""
        return (self.shape,) if self.critic_shape is None else (self.shape, self.critic_shape)

    @property
    def row(self) -> LargestRow:
        """The largest that a rank computes at once."""
        share = -(-self.mini_batch // self.layout.data_indices)
        return largest_row(self.prompt, self.response, self.siblings, self.micro_batch_tokens, share)

    def rank(self) -> TrainerRank:
        row = self.row
        return TrainerRank(
            shape=self.shape,
            layout=self.layout,
            row=row,
            itemsize=self.itemsize,
            on_cpu=not self.trainer_gpus,
            accumulates=row.samples * self.layout.data_indices < self.mini_batch,
            checkpointing=self.checkpointing,
            offload=self.offload,
            chunk=self.chunk,
            memory=self.trainer_memory,
            muon=self.muon,
            critic=self.critic,
            critic_shape=self.critic_shape,
            reference=self.reference,
            full_kl=self.full_kl,
            adapter=self.adapter,
            deterministic=self.deterministic,
        )

    def engine(self) -> EngineGpu:
        return EngineGpu(
            shape=self.shape,
            itemsize=self.itemsize,
            context=self.context,
            sequences=self.sequences,
            tensor=self.tensor,
            vllm=self.vllm,
            share=self.share,
            memory=self.engine_memory if self.engine_gpus else None,
            batched=self.batched,
            cache_itemsize=self.cache_itemsize,
            cache_bytes=self.cache_bytes if self.engine_gpus else self.cache_bytes or _CPU_CACHE,
            eager=self.eager or not self.engine_gpus,
            adapter=self.adapter if self.adapter is not None and self.adapter.alone else None,
        )


_CPU_CACHE = 256 << 20
"""vLLM's KV cache on a CPU, unless told (rljob_trainer/rollout/vllm_engine.py)."""


def _number(arguments: FreeForm, name: str) -> float | None:
    value = arguments.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
