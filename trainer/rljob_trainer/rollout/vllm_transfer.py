"""Our end of vLLM's weight-transfer interface: what runs in each of its worker processes during a publication.

vLLM calls ``start_weight_update``, any number of ``update_weights`` and ``finish_weight_update``; layers are rebuilt
one by one as their tensors arrive (vLLM's layer-wise reload), so a second model never exists. Imported by vLLM as the
workers' extension class, which is how the backend gets to be known in every process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.nccl import unpinned_nccl_env

from rljob_trainer.episodes.tokens import ByteArray
from rljob_trainer.errors import EngineError
from rljob_trainer.weights.adapters import PublishedAdapter
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import Manifest, manifest_of
from rljob_trainer.weights.receiver import Receiver, ReceiveReport

if TYPE_CHECKING:
    from rljob_trainer.rollout.vllm_routing import RoutingCapture

BACKEND = "rljob"
OWNER = "RLJOB_ENGINE_OWNER"
"""The variable with the process whose engine a core in its own process belongs to."""


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Which group to join; worker w of the engine becomes rank ``first_rank + w``."""

    link: WeightLink
    first_rank: int
    timeout: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Either a publication to receive, or tensors handed over in this process."""

    version: int | None = None
    timeout: float = 0.0
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)


class RljobWeightTransfer(WeightTransferEngine[JoinInfo, UpdateInfo]):
    """Receives from ``weights.sender.Publisher`` and loads through the model's own loaders."""

    init_info_cls = JoinInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.receiver: Receiver | None = None
        self.report: ReceiveReport | None = None
        self.takes_adapters = self.vllm_config.lora_config is not None
        """Whether what comes is an adapter to the model that is there, and not a model."""
        self.arrived: dict[str, Tensor] = {}
        """Of an adapter, in the update under way."""
        self.awaited: set[str] = set()
        """vLLM's names of the parameters that the latest update has not brought, or not yet."""

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self.shutdown()
        rank = init_info.first_rank + self.parallel_config.rank
        # Batch invariance pins settings of NCCL in this process, which members of one communicator must have alike: the
        # learner has none of them, and the first byte would never arrive.
        with unpinned_nccl_env():
            self.receiver = Receiver(init_info.link, rank, timeout=init_info.timeout, device=self.device)

    def start_weight_update(self) -> None:
        self.report = None
        self.arrived = {}
        if self.takes_adapters:
            return
        if self.device.type == "cpu":
            _forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        # While it reloads, vLLM lists a head apart that is the embedding's matrix.
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        self.awaited = {
            name
            for name, parameter in self.model.named_parameters()
            if parameter.numel() and not (tied and name.endswith("lm_head.weight"))
        }

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.version is None:
            self._load(update_info.tensors)
            return
        if self.receiver is None:
            raise EngineError("vLLM worker: asked to receive weights before it joined a weight group")
        self.report = self.receiver.receive(update_info.version, self._load, lambda name: None, update_info.timeout)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self.takes_adapters:
            self.arrived |= dict(tensors)
            return
        model: Any = self.model
        self.awaited -= set(model.load_weights(tensors))

    def finish_weight_update(self) -> None:
        if self.takes_adapters:
            return
        finalize: Any = finalize_layerwise_reload
        finalize(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_tied_heads(self.model)

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


def _forget_expert_kernels(model: Any) -> None:
    """A mixture-of-experts layer keeps packed weights in its CPU kernel and would go on using the old ones."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied_heads(model: Any) -> None:
    """An output layer that shares the embedding's matrix is sent no tensor of its own, so vLLM leaves it alone, and its
    CPU kernel would go on using the packed copy of the first weights."""
    embeddings: list[Any] = [module for module in model.modules() if type(module) is VocabParallelEmbedding]
    heads: list[Any] = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    loaded = {embedding.weight.data_ptr() for embedding in embeddings}
    for head in heads:
        if head.weight.data_ptr() in loaded:
            head.quant_method.process_weights_after_loading(head)


class VLLMWorker(Protocol):
    """One of vLLM's workers, as the functions below see it."""

    weight_transfer_engine: Any
    model_runner: Any
    routing: RoutingCapture

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self) -> None: ...


class WorkerExtension:
    """Mixed into vLLM's workers."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Before a model is loaded. Not when this module is imported, which a forked process has done before.
        end_with_owner()
        return super().__new__(cls)

    def rljob_run(self, call: bytes) -> bytes:
        """For a core in another process: runs a pickled function of this worker. Returns its answer and its error, one
        of which is None, pickled too."""
        try:
            return pickle.dumps((pickle.loads(call)(self), None))
        except Exception as error:  # noqa: BLE001  (raised again by who asked)
            return pickle.dumps((None, _portable(error)))


def _portable(error: Exception) -> Exception:
    """The error, or where it cannot be made again from its arguments one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (whatever its class does)
        return EngineError(f"{type(error).__name__}: {error}")
    return error


def join(worker: VLLMWorker, link: WeightLink, first_rank: int, timeout: float) -> None:
    """Joins a weight group (``JoinInfo``)."""
    worker.init_weight_transfer_engine({"link": link, "first_rank": first_rank, "timeout": timeout})


def start_update(worker: VLLMWorker) -> None:
    worker.start_weight_update()


def receive(worker: VLLMWorker, version: int, timeout: float) -> None:
    """Receives a publication from the weight group."""
    worker.update_weights({"version": version, "timeout": timeout})


def take(worker: VLLMWorker, tensors: list[tuple[str, Tensor]]) -> None:
    """Loads tensors of this process."""
    worker.update_weights({"tensors": tensors})


def finish_update(worker: VLLMWorker) -> None:
    worker.finish_weight_update()


def lacking(worker: VLLMWorker) -> set[str]:
    """The parameters, by vLLM's names, that the finished update did not bring. vLLM only logs a warning and keeps their
    old values."""
    transfer: RljobWeightTransfer = worker.weight_transfer_engine
    # Scales of a quantisation are made, not sent.
    return transfer.awaited if transfer.model_config.quantization is None else set()


def received(worker: VLLMWorker) -> tuple[ReceiveReport, Manifest]:
    """What the last publication cost this worker, and what it brought."""
    transfer: RljobWeightTransfer = worker.weight_transfer_engine
    assert transfer.report is not None
    assert transfer.receiver is not None
    assert transfer.receiver.manifest is not None
    return transfer.report, transfer.receiver.manifest


def install_adapter(worker: VLLMWorker, number: int, base_sha256: str) -> None:
    """Puts the adapter that arrived in the place of the one before, for requests with the id ``number``."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    transfer: RljobWeightTransfer = worker.weight_transfer_engine
    arrived, transfer.arrived = transfer.arrived, {}
    adapter = PublishedAdapter.of(arrived, base_sha256)
    workers = worker.model_runner.lora_manager
    manager = workers._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    helper = PEFTHelper.from_dict(adapter.config())
    helper.validate_legal(workers.lora_config)
    made = LoRAModel.from_lora_tensors(
        number,
        dict(adapter.matrices),
        helper,
        device="cpu",
        dtype=workers.lora_config.lora_dtype,
        model_vocab_size=workers.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    manager.remove_all_adapters()
    manager.add_adapter(made)
    manager.activate_adapter(number)
    manager.pin_adapter(number)


def tell_experts(worker: VLLMWorker) -> None:
    """From here on notes which experts the model's routers choose."""
    from rljob_trainer.rollout.vllm_routing import RoutingCapture

    worker.routing = RoutingCapture(worker.model_runner)


def experts(worker: VLLMWorker, requests: list[str]) -> list[ByteArray]:
    """The experts of the tokens of each request that were computed, ``[tokens, layers, k]``; they are then
    forgotten."""
    return [worker.routing.take(request) for request in requests]


def parameters(worker: VLLMWorker) -> Manifest:
    """The sums of the parameters as they lie in this worker's memory, an adapter's included."""
    model: torch.nn.Module = worker.model_runner.get_model()
    stacks = (
        (f"{name}.{kind}.{index}", tensor)
        for name, module in model.named_modules()
        if isinstance(module, BaseLayerWithLoRA)
        for kind, tensors in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked))
        for index, tensor in enumerate(tensors)
    )
    return manifest_of([*((name, p.data) for name, p in model.named_parameters()), *stacks])


def scale_logits(worker: VLLMWorker, scale: float) -> None:
    """Multiplies all logits by ``scale``: how given sequences are scored at a temperature."""
    worker.model_runner.get_model().logits_processor.scale = scale


def end_with_owner() -> None:
    """In each process of a core that has its own: has that core and this process killed when the process that started
    it is gone, however it went, or the core. vLLM's workers end with their core when they are told to, and one that
    waits for another in an exchange never hears it."""
    owner = int(os.environ.get(OWNER, 0))
    parent = multiprocessing.parent_process()
    if not owner or parent is None or owner == os.getpid():
        return
    # With one worker the core is this process, with several its parent.
    core = parent.pid if parent.pid and parent.pid != owner else os.getpid()

    def watch() -> None:
        with suppress(ProcessLookupError):
            wait([os.pidfd_open(process) for process in {owner, core} - {os.getpid()}])
        for process in (core, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    threading.Thread(target=watch, name="engine-owner-watch", daemon=True).start()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, RljobWeightTransfer)
