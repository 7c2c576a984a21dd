"""vLLM behind the ``Engine`` protocol: the real engine, on CPU or GPU, in this process or one of its own.

Tokens in, tokens out: vLLM's tokenizer is not loaded. Requests carry their own seeds, log-probs are vLLM's "processed"
ones (after temperature, top-k and top-p), versions are vLLM's own record of which weights made which token, and weights
come in through its weight-transfer interface (``vllm_transfer.py``).

vLLM is given no more requests than it may run at once; the others wait here. So none can have met the weights of a
version under which it has no token, and there is always a place for sequences that are to be scored.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from rljob_trainer.episodes.episode import FinishReason
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import (
    GenerationRequest,
    GenerationResult,
    already_finished,
    brought_along,
    check_request,
    continued,
    withdrawn,
)
from rljob_trainer.episodes.tokens import ByteArray, FloatArray, Tokens
from rljob_trainer.errors import EngineError
from rljob_trainer.models.config import has_experts, read_json
from rljob_trainer.models.stored import tensors_in
from rljob_trainer.rollout.routing import with_experts, without_experts
from rljob_trainer.rollout.vllm_arguments import (
    engine_arguments,
    environment,
    model_runner,
    refuse_variant_kernels,
)
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import Manifest, manifest_of
from rljob_trainer.weights.receiver import ReceiveReport
from rljob_trainer.weights.residence import Resident, fingerprint

_SCORE = "rljob-score-"
_ADAPTER = 1
"""The id of the only one."""


class VLLMEngine:
    """An ``Engine`` over ``vllm.LLMEngine``; one at a time with its core in this process, because vLLM's parallel
    groups belong to the process (closing one of two would take them from the other)."""

    _open: ClassVar[bool] = False

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        version: int = 0,
        max_concurrent: int = 256,
        max_context: int | None = None,
        tensor_parallel: int = 1,
        seed: int = 0,
        request_seeds: bool = True,
        keep_cache: bool = False,
        adapter_rank: int | None = None,
        own_process: bool = False,
        ended: Callable[[EngineError], None] = lambda error: None,
        start_seconds: float = 600.0,
        tells_experts: bool = False,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Reads the model in ``folder``. ``engine_args`` go to vLLM's ``EngineArgs`` and win over everything else.

        ``keep_cache``: requests that run across an update go on with the keys and values they have (otherwise they are
        prefilled anew). What is cached between two updates is then salted with their count, so that nothing later
        meets it.
        ``adapter_rank``: updates bring adapters of this rank to the model in the folder, which stays as it is.
        ``tells_experts``: responses say which experts of a mixture their tokens were sent to (``routed_experts``).
        ``request_seeds`` False lets vLLM draw from one generator for all requests: faster on a GPU with hundreds of
        requests, and not repeatable. ``own_process``: vLLM's core gets a process (``vllm_core.py``), and ``ended`` is
        told when that ends unasked; its model may take ``start_seconds`` to load. Raises ``EngineError`` while another
        core is open in this process, and where the environment wants to choose where it runs.
        """
        if VLLMEngine._open and not own_process:
            raise EngineError("vLLM engine: another one is open in this process; close() it first")
        on_cpu = device.startswith("cpu")
        os.environ |= environment(os.environ, on_cpu=on_cpu, start_seconds=start_seconds, tells_experts=tells_experts)
        # Only now: vLLM reads its environment when it is imported.
        import vllm
        from vllm import EngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform

        from rljob_trainer.rollout import vllm_core, vllm_transfer

        if not on_cpu:
            refuse_variant_kernels(os.environ, current_platform.get_device_capability())

        arguments = engine_arguments(
            folder,
            on_cpu=on_cpu,
            dtype=dtype,
            max_concurrent=max_concurrent,
            max_context=max_context,
            tensor_parallel=tensor_parallel,
            seed=seed,
            keep_cache=keep_cache,
            adapter_rank=adapter_rank,
            tells_experts=tells_experts,
            given={
                "weight_transfer_config": WeightTransferConfig(backend=vllm_transfer.BACKEND),
                "worker_extension_cls": f"{vllm_transfer.__name__}.{vllm_transfer.WorkerExtension.__name__}",
                **(engine_args or {}),
            },
        )
        self._calls = vllm_transfer
        self._engine, self.core = vllm_core.start_core(EngineArgs(**arguments), own_process=own_process, ended=ended)
        self.program = f"vLLM {vllm.__version__}, model runner {model_runner(self._engine.vllm_config)}"
        """What samples here; its tests have run with one of the two model runners (docs/real-cluster.md)."""
        self._own_process = own_process
        self.takes_tensors = tensor_parallel == 1 and not own_process
        """Whether ``load`` reaches the worker."""
        VLLMEngine._open = VLLMEngine._open or not own_process
        self._context = int(self._engine.model_config.max_model_len)
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        self._max_concurrent = int((engine_args or {}).get("max_num_seqs", max_concurrent))
        self._keep_cache = keep_cache
        self._base = None if adapter_rank is None else manifest_of(tensors_in(Path(folder))).sha256
        """Of the model that adapters belong to."""
        self._adapter: Any = None
        """What requests name the adapter by; None before the first update."""
        self._workers = tensor_parallel
        self._expert_layers: list[int] | None = None
        """Those that choices are told of; None: nothing is told."""
        self._chosen = 0
        """How many a layer chooses for each token."""
        if tells_experts:
            config = read_json(Path(folder) / "config.json")
            self._expert_layers = [n for n in range(config["num_hidden_layers"]) if has_experts(config, n)]
            self._chosen = config["num_experts_per_tok"]
            if on_cpu:
                self.core.workers(self._calls.tell_experts)
        self._notes_experts = tells_experts and on_cpu
        """Whether our part of the workers tells them, and not vLLM."""
        self._request_seeds = request_seeds
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self._requests: dict[str, tuple[GenerationRequest, str]] = {}
        """Those inside vLLM by our id, with vLLM's."""
        self._waiting: deque[GenerationRequest] = deque()
        """Those that wait for room inside, or for ``wake``."""
        self._finished: list[GenerationResult] = []
        self._tokens_made = 0
        self._updating = False
        self._session = False
        """Whether vLLM has an update under way."""
        self._asleep = False
        self._weights_away = False
        """Whether the weights, too, are not on the device."""
        self._version = version
        self._manifest: Manifest | None = None
        self._gone = False
        self._updates = 0
        self._engine.set_weight_version(str(version))

    # ------------------------------------------------------------------ requests

    @property
    def version(self) -> int:
        return self._version

    @property
    def manifest(self) -> Manifest | None:
        return self._manifest

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._finished or (self._waiting and not self._asleep))

    @property
    def running(self) -> int:
        return len(self._requests)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def tokens_made(self) -> int:
        return self._tokens_made + sum(map(self._tokens_inside, self._requests))

    def _tokens_inside(self, name: str) -> int:
        states: Any = self._engine.output_processor.request_states
        count: int = states[self._requests[name][1]].detokenizer.num_output_tokens()
        return count

    def add(self, request: GenerationRequest) -> None:
        check_request(request, self._context)
        if max(request.prefix) >= self._vocabulary:
            raise ValueError(
                f"{request.id}: token {max(request.prefix)} is beyond the vocabulary of {self._vocabulary}"
            )
        if reason := already_finished(request):
            self._finished.append(brought_along(request, reason))
        else:
            self._waiting.append(request)

    @property
    def _salt(self) -> str:
        # Not the version: an engine that deviates is sent the same one again, after having cached under wrong weights.
        return f"update {self._updates}"

    def _submit(self, request: GenerationRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, so_far = request.sampling, len(request.begun)
        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens - so_far,
            # Ids beyond the vocabulary cannot be drawn, and vLLM refuses them.
            stop_token_ids=[token for token in sampling.stop_token_ids if 0 <= token < self._vocabulary],
            ignore_eos=True,
            seed=_seed_at(request.seed, so_far) if self._request_seeds else None,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prefix)}
        if self._keep_cache:
            prompt["cache_salt"] = self._salt
        name = str(request.id)
        inner = self._engine.add_request(name, prompt, parameters, lora_request=self._adapter)  # type: ignore[arg-type]
        self._requests[name] = request, inner

    def step(self) -> list[GenerationResult]:
        if self._updating or self._asleep:
            state = "waits for finish_update()" if self._updating else "sleeps; call wake() first"
            raise EngineError(f"vLLM engine: step() was called while it {state}")
        while self._waiting and len(self._requests) < self._max_concurrent:
            self._submit(self._waiting.popleft())
        finished, self._finished = self._finished, []
        if self._requests:
            finished += [self._take(output) for output in self.core.step() if output.finished]
        return finished

    def abort(self, ids: Iterable[EpisodeId] | None = None) -> list[GenerationResult]:
        wanted = None if ids is None else set(ids)
        inside = [name for name, (request, _) in self._requests.items() if wanted is None or request.id in wanted]
        results = self._abort_inside(inside)
        return results + withdrawn(self._waiting, wanted)

    def _abort_inside(self, names: Iterable[str]) -> list[GenerationResult]:
        """What the named requests have, which are vLLM's no longer."""
        outputs: list[Any] = []
        inner_ids = [self._requests[name][1] for name in names]
        for inner in inner_ids:
            # vLLM hands the final output of an aborted request to the queue of whoever streams it.
            self._engine.output_processor.request_states[inner].queue = _Sink(outputs)  # type: ignore[assignment]
        self._engine.abort_request(inner_ids, internal=True)
        return [self._take(output) for output in outputs]

    def _take_back(self, names: Iterable[str]) -> None:
        """The named requests leave vLLM and wait, the first in the queue, to go on."""
        requests = {name: self._requests[name][0] for name in names}
        back = [continued(requests[str(partial.id)], partial) for partial in self._abort_inside(requests)]
        self._waiting.extendleft(reversed(back))

    def _take(self, output: Any) -> GenerationResult:
        """A finished or aborted vLLM request as a result, with what it brought along in front."""
        request, inner = self._requests.pop(output.request_id)
        (completion,) = output.outputs
        versions: list[int] = []
        for span in completion.weight_versions or ():
            versions += [int(span.version)] * (span.end - span.start)
        reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
        if completion.finish_reason not in reasons:
            raise EngineError(f"vLLM ended request {output.request_id} with {completion.finish_reason!r}")
        self._tokens_made += len(completion.token_ids)
        log_probs = completion.logprobs.logprobs if completion.logprobs is not None else ()
        made = Tokens.sampled(
            np.array(completion.token_ids, np.int32), np.array(log_probs, np.float32), np.array(versions, np.int32)
        )
        if self._expert_layers is None:
            begun = without_experts(request.begun)
        else:
            begun, made = with_experts(request, made, self._experts(inner, completion, self._expert_layers))
        tokens = Tokens.joined([begun, made]) if len(begun) else made
        prefilled = len(request.prefix) - (output.num_cached_tokens or 0) if len(completion.token_ids) else 0
        return GenerationResult(request.id, tokens, reasons[completion.finish_reason], prefilled=prefilled)

    def _experts(self, inner: str, completion: Any, layers: list[int]) -> ByteArray:
        """``[tokens, layers, k]`` of a request's tokens that were computed, from the first one on."""
        if self._notes_experts:
            return self.core.workers(partial(self._calls.experts, requests=[inner]))[0][0]
        told = completion.routed_experts
        return np.zeros((0, len(layers), self._chosen), np.uint8) if told is None else told[:, layers].astype(np.uint8)

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[FloatArray]:
        """Requests that are running go on meanwhile."""
        if self._asleep:
            # vLLM would take the sequences and never begin.
            raise EngineError("vLLM engine: score() was called while it sleeps; call wake() first")
        if self._requests and temperature != 1:
            raise EngineError("vLLM engine: score() at another temperature than 1 while requests are running")
        # Prompt log-probs ignore the temperature, so the logits themselves are scaled for the while.
        scale = self._calls.scale_logits
        self.core.workers(partial(scale, scale=1.0 / (temperature or 1.0)))
        try:
            return self._scores(sequences)
        finally:
            self.core.workers(partial(scale, scale=1.0))

    def _scores(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[FloatArray]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True
        )
        for index, (prompt, response) in enumerate(sequences):
            ids: dict[str, Any] = {"prompt_token_ids": [*prompt, *response]}
            if self._keep_cache:
                ids["cache_salt"] = self._salt
            self._engine.add_request(f"{_SCORE}{index}", ids, parameters, lora_request=self._adapter)  # type: ignore[arg-type]
        scores: dict[int, FloatArray] = {}
        while len(scores) < len(sequences):
            for output in self.core.step():
                if not output.request_id.startswith(_SCORE):
                    if output.finished:
                        self._finished.append(self._take(output))
                    continue
                index = int(output.request_id.removeprefix(_SCORE))
                response = sequences[index][1]
                flat = output.prompt_logprobs
                starts = flat.start_indices[len(flat) - len(response) :]
                # The token itself comes first in its position.
                scores[index] = np.array([flat.logprobs[s] for s in starts], np.float32)
        return [scores[index] for index in range(len(sequences))]

    # ------------------------------------------------------------------ weights

    @property
    def weight_ranks(self) -> int:
        return self._workers

    def join_weights(self, link: WeightLink, first_rank: int, timeout: float) -> None:
        self.core.workers(partial(self._calls.join, link=link, first_rank=first_rank, timeout=timeout))

    def receive_weights(self, version: int, timeout: float) -> ReceiveReport:
        self.begin_update()
        self._update(partial(self._calls.receive, version=version, timeout=timeout))
        received = self.core.workers(self._calls.received)
        report, manifest = received[0]
        if any(other != manifest for _, other in received):
            raise EngineError(f"vLLM engine: its workers hold different manifests of version {version}")
        self.finish_update(version, manifest)
        return report

    def begin_update(self) -> None:
        self._take_in()
        self._updating = True
        self._manifest = None
        if not self._session:
            self.core.workers(self._calls.start_update)
            self._session = True

    def _take_in(self) -> None:
        """Waits for the batch that is under way and takes its tokens, without beginning another."""
        self._finished += [self._take(output) for output in self.core.settle() if output.finished]

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes tensors of this process (where vLLM's workers have others: use ``receive_weights``)."""
        if not self._updating:
            raise EngineError("vLLM engine: load() before begin_update()")
        if not self.takes_tensors:
            raise EngineError("vLLM engine: load() cannot reach workers in other processes; use receive_weights()")
        self._update(partial(self._calls.take, tensors=list(tensors)))

    def _update(self, bring: Callable[[Any], None]) -> None:
        try:
            self.core.workers(bring)
        except BaseException:
            # vLLM ends its session then; the next update begins a new one.
            self._session = False
            raise

    def finish_update(self, version: int, manifest: Manifest) -> None:
        self.core.workers(self._calls.finish_update)
        self._session = False
        if lacking := set().union(*self.core.workers(self._calls.lacking)):
            raise EngineError(
                f"vLLM engine: the update to version {version} lacks {len(lacking)} parameters, first {min(lacking)}; "
                "learner and engine must be built from the same model folder"
            )
        if self._base is not None:
            self._install_adapter(self._base)
        self._updates += 1
        # Keys and values of the old weights must not be met again.
        if self._keep_cache and self._requests:
            # Those who hold some go on with them; the salt keeps others away. Who has no token yet starts anew.
            self._take_back([name for name in self._requests if self._tokens_inside(name) == 0])
        elif not self._engine.reset_prefix_cache(reset_running_requests=bool(self._requests)):
            raise EngineError(f"vLLM engine: the prefix cache could not be reset after the update to version {version}")
        self._engine.set_weight_version(str(version))
        self._version, self._manifest = version, manifest
        self._updating = self._gone = False
        if not self._asleep:
            self.core.resume()

    def _install_adapter(self, base: str) -> None:
        from vllm.lora.request import LoRARequest

        # In the place of the last one, under its id: what was cached under that is forgotten after every update.
        self.core.workers(partial(self._calls.install_adapter, number=_ADAPTER, base_sha256=base))
        self._adapter = LoRARequest("policy", _ADAPTER, "memory")

    def resident(self, in_any_order: bool = False) -> Resident | None:
        """The fingerprint of the workers' parameters: vLLM fuses matrices and lays them out for its kernels. On a CPU
        its matrices are packed out of sight, and embeddings, norms and biases are what is left to look at."""
        if self._weights_away:
            return None
        return fingerprint(self.core.workers(self._calls.parameters))

    # ------------------------------------------------------------------ memory

    def sleep(self, keep_weights: bool = True) -> None:
        """On a GPU frees weights and cache: by vLLM's level 1 weights go to host memory, by its level 2 they are gone
        until the next update, and copied neither way. On a CPU vLLM cannot; the requests are set aside all the same."""
        self._take_in()
        self._take_back(list(self._requests))
        if self._can_sleep:
            # No update brings back the model beside which an adapter works.
            self._engine.sleep(level=1 if keep_weights or self._base is not None else 2)
        if not keep_weights:
            self._gone, self._manifest = True, None
        self._asleep = self._weights_away = True

    def wake_weights(self) -> None:
        if self._weights_away and self._can_sleep:
            self._engine.wake_up(tags=["weights"])
        self._weights_away = False

    def wake(self) -> None:
        if self._gone:
            raise EngineError("vLLM engine: wake() before the update that sleep(keep_weights=False) needs")
        self.wake_weights()
        if self._asleep and self._can_sleep:
            self._engine.wake_up(tags=["kv_cache"])
        if self._asleep and not self._updating:
            self.core.resume()
        self._asleep = False

    def close(self) -> None:
        self.core.close()
        VLLMEngine._open = VLLMEngine._open and self._own_process


class _Sink:
    """Stands in for the queue of a streaming client."""

    def __init__(self, outputs: list[Any]) -> None:
        self.put = outputs.append


def _seed_at(seed: int, position: int) -> int:
    """A request's seed after ``position`` tokens: vLLM's generator starts anew when a request is continued, and must
    not draw the same numbers for other positions."""
    mixed = (seed + position * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF
    return mixed if position else seed & 0x7FFFFFFFFFFFFFFF
