"""vLLM's core in a process of its own: what happens when it, or the process that started it, is killed.

What such an engine computes is tested with the other kind's tests (``test_vllm_engine.py``).
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from deep_core import deepen, under_way_when_paused
from slow_core import slow
from small_episodes import named
from transformers import DynamicCache, PreTrainedModel

from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.errors import EngineError
from rljob_trainer.rollout.actor import EngineSpec, build_engine
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.plan import describe
from rljob_trainer.weights.sender import Publisher

pytestmark = pytest.mark.vllm

# More than the block of tokens that vLLM caches on a CPU (128).
PROMPT, LENGTH = tuple(3 + i % 90 for i in range(130)), 120
SECONDS = 120
FIRST = 20
"""The version with which the batches begin that are under way."""


def spec(folder: Path) -> EngineSpec:
    return EngineSpec(
        "vllm",
        str(folder),
        max_context=256,
        max_concurrent=4,
        keep_cache=True,
        own_process=True,
        engine_args={"kv_cache_memory_bytes": 64 << 20},
    )


def below(process: int) -> list[psutil.Process]:
    """vLLM's processes among its descendants: the core and its workers."""
    found = psutil.Process(process).children(recursive=True)
    return [one for one in found if "resource_tracker" not in " ".join(one.cmdline())]


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all end in time; a zombie has ended."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
            return True
        time.sleep(0.05)
    return False


def new_loop(folder: Path) -> EngineLoop:
    """As its actor has it."""
    made: queue.Queue[EngineLoop] = queue.Queue()
    loop = EngineLoop(lambda: build_engine(spec(folder), lambda error: made.queue[0].fail(error)), "3")
    made.put(loop)
    return loop


@pytest.fixture(scope="module")
def loop(llama_folder: Path) -> Iterator[EngineLoop]:
    loop = new_loop(llama_folder)
    yield loop
    if loop._thread.is_alive():
        loop.close()


def ask(number: int, length: int = LENGTH) -> GenerationRequest:
    return GenerationRequest(named(str(number)), PROMPT, SamplingSettings(max_tokens=length), seed=number)


def test_with_a_kept_cache_each_token_has_the_version_that_made_it(
    loop: EngineLoop,
    llama: PreTrainedModel,
    make_model: Callable[..., PreTrainedModel],
    log_probs_of: Callable[..., np.ndarray],
) -> None:
    """The core runs on while weights are announced: what it made until they came is the old ones', to the token."""
    new = make_model("llama", seed=5)
    publisher = Publisher(1 << 16, "127.0.0.1")
    link = WeightLink(publisher.address, 1, ("the learner", "engine 0"))
    tensors = dict(new.named_parameters())
    stack = ExitStack()
    with ThreadPoolExecutor(2) as beside:
        connected = beside.submit(publisher.connect, link, 60)
        loop.join_weights(link, 1, 60)
        connected.result(60)
        core: Any = loop.call(lambda engine: engine.core)  # type: ignore[attr-defined]
        sent = beside.submit(publisher.publish, describe(tensors.items()), tensors.items(), 7, 60)
        loop.call(lambda _: stack.enter_context(slow(core)))
        loop.submit([ask(number) for number in range(4)])
        while loop.status().tokens_made < 12:
            pass
        loop.receive_weights(7, 60)
        sent.result(60)
        loop.call(lambda _: stack.close())
    loop.submit([ask(9, length=20)])
    results = {}
    while len(results) < 5:
        results |= {result.id.purpose: result for result in loop.collect(SECONDS)}
    for number in range(4):
        tokens = results[str(number)].tokens
        response, split = tuple(tokens.ids.tolist()), int(np.searchsorted(tokens.versions, 7))
        assert tokens.versions.tolist() == [0] * split + [7] * (LENGTH - split)
        assert 0 < split < LENGTH
        old = log_probs_of(llama, PROMPT, response)
        np.testing.assert_allclose(tokens.log_probs[:split], old[:split], atol=1e-4)
        # The next is the new model's, with the old one's keys and values: neither model's alone.
        for alone in (old, log_probs_of(new, PROMPT, response)):
            assert abs(tokens.log_probs[split] - alone[split]) > 1e-4
    later = results["9"].tokens
    assert set(later.versions.tolist()) == {7}
    expected = log_probs_of(new, PROMPT, tuple(later.ids.tolist()))
    np.testing.assert_allclose(later.log_probs, expected, atol=1e-4)


def mixed_log_probs(models: Sequence[PreTrainedModel], response: tuple[int, ...], begins: Sequence[int]) -> np.ndarray:
    """Log-probs ``[T]`` of the response, whose tokens from ``begins[n]`` on are drawn by the n-th model: it reads the
    token before, and finds keys and values of all earlier ones as the models before it have left them."""
    ids = torch.tensor([[*PROMPT, *response]])
    cache, parts = DynamicCache(), []
    reads = [0, *(len(PROMPT) + begin - 1 for begin in begins[1:]), ids.shape[1] - 1]
    with torch.no_grad():
        for model, start, end in zip(models, reads[:-1], reads[1:], strict=True):
            parts.append(model(ids[:, start:end], past_key_values=cache).logits[0])
    logits = torch.cat(parts)[len(PROMPT) - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def test_a_batch_that_is_under_way_when_weights_come_belongs_to_the_weights_that_made_it(
    loop: EngineLoop, make_model: Callable[..., PreTrainedModel]
) -> None:
    """As on GPUs, where the core has scheduled a batch before it takes in the last one's tokens."""
    models = [make_model("llama", seed=seed) for seed in (30, 31, 32, 33)]
    core: Any = loop.call(lambda engine: engine.core)  # type: ignore[attr-defined]
    publisher = Publisher(1 << 16, "127.0.0.1")
    link = WeightLink(publisher.address, 2, ("the learner", "engine 0"))
    stack = ExitStack()
    with ThreadPoolExecutor(2) as beside:
        connected = beside.submit(publisher.connect, link, 60)
        loop.join_weights(link, 1, 60)
        connected.result(60)

        def publish(version: int) -> None:
            tensors = dict(models[version - FIRST].named_parameters())
            sent = beside.submit(publisher.publish, describe(tensors.items()), tensors.items(), version, 60)
            loop.receive_weights(version, 60)
            sent.result(60)

        publish(FIRST)
        loop.call(lambda _: deepen(core))
        loop.call(lambda _: stack.enter_context(slow(core)))
        loop.submit([ask(number, length=40) for number in range(3)])
        for version in range(FIRST + 1, FIRST + 4):
            so_far = loop.status().tokens_made
            while loop.status().tokens_made < so_far + 9:
                pass
            publish(version)
        under_way = loop.call(lambda _: under_way_when_paused(core))
        loop.call(lambda _: stack.close())
    results: dict[str, Tokens] = {}
    while len(results) < 3:
        results |= {result.id.purpose: result.tokens for result in loop.collect(SECONDS)}
    assert len(under_way) == 3
    assert min(under_way) > 0
    for tokens in results.values():
        begins = [int(np.searchsorted(tokens.versions, FIRST + number)) for number in range(4)]
        assert begins[0] == 0 < begins[1] < begins[2] < begins[3] < 40
        assert tokens.versions.tolist() == sorted(tokens.versions.tolist())
        expected = mixed_log_probs(models, tuple(tokens.ids.tolist()), begins)
        np.testing.assert_allclose(tokens.log_probs, expected, atol=1e-4)


def test_a_core_that_is_killed_idle_ends_the_engine_with_its_reason(loop: EngineLoop) -> None:
    """The last one that asks for the module's engine."""
    assert_ends_with_its_core(loop, busy=False)


@pytest.mark.slow(stands_for="test_a_core_that_is_killed_idle_ends_the_engine_with_its_reason")
def test_a_core_that_is_killed_at_work_ends_the_engine_with_its_reason(llama_folder: Path) -> None:
    assert_ends_with_its_core(new_loop(llama_folder), busy=True)


def assert_ends_with_its_core(loop: EngineLoop, *, busy: bool) -> None:
    [core] = [one for one in below(os.getpid()) if one.ppid() == os.getpid() and _is_of(loop, one)]
    of_core = [core, *core.children(recursive=True)]
    if busy:
        loop.submit([ask(number) for number in range(4)])
    with ThreadPoolExecutor(1) as waiting:
        ended = waiting.submit(loop.wait_until_ended)
        core.send_signal(signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"engine 3 failed.*process \({core.pid}\) ended unexpectedly"):
            ended.result(SECONDS)
    with pytest.raises(EngineError, match="engine 3 failed"):
        loop.status()
    loop._thread.join(SECONDS)
    assert not loop._thread.is_alive()
    assert gone(of_core)


def _is_of(loop: EngineLoop, process: psutil.Process) -> bool:
    core: Any = loop.call(lambda engine: engine.core)  # type: ignore[attr-defined]
    return process.pid in [one.pid for one in core.processes]


def test_what_is_asked_of_a_core_after_its_end_is_refused_too() -> None:
    """vLLM's client forgets nobody who waits, and notices the end later than we do."""
    from rljob_trainer.rollout.vllm_core import CoreProcess

    life, held = os.pipe()
    process = SimpleNamespace(pid=4711, sentinel=life)
    resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
    client = SimpleNamespace(
        resources=resources, outputs_queue=queue.Queue(), utility_results={}, shutdown=lambda: os.close(life)
    )
    told: queue.Queue[EngineError] = queue.Queue()
    answered = threading.Event()

    def ended(error: EngineError) -> None:
        told.put(error)
        answered.wait(SECONDS)

    engine: Any = SimpleNamespace(engine_core=client)
    core = CoreProcess(engine, ended)
    os.close(held)
    assert "4711" in str(told.get(timeout=SECONDS))
    for number in range(3):
        client.utility_results[number] = answer = Future[None]()
        with pytest.raises(EngineError, match="ended unexpectedly"):
            answer.result(SECONDS)
    answered.set()
    core.close()


def test_an_end_that_vllm_notices_first_has_its_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    from rljob_trainer.rollout import vllm_core

    def dead() -> None:
        raise EngineDeadError

    life, held = os.pipe()
    process = SimpleNamespace(pid=4712, sentinel=life)
    client = SimpleNamespace(
        resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[process])),
        outputs_queue=queue.Queue(),
        utility_results={},
        shutdown=lambda: os.close(held),
    )
    engine: Any = SimpleNamespace(engine_core=client, step=dead)
    core = vllm_core.CoreProcess(engine, lambda error: None)
    monkeypatch.setattr(vllm_core, "_END_SECONDS", 0.01)
    with pytest.raises(EngineDeadError):  # of something else than its end
        core.step()
    monkeypatch.setattr(vllm_core, "_END_SECONDS", SECONDS)
    ending = threading.Timer(0.1, core.close)
    ending.start()
    with pytest.raises(EngineError, match=r"process \(4712\) ended unexpectedly"):
        core.step()
    ending.join()
    os.close(life)


class ParticularError(Exception):
    """Made of more than its arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def _fails(worker: Any) -> None:
    raise worker


@pytest.mark.parametrize("error", [ParticularError(code=7), KeyError("name")])
def test_an_error_of_a_worker_reaches_whoever_asked(error: Exception) -> None:
    from rljob_trainer.rollout.vllm_transfer import WorkerExtension

    worker: Any = error
    answer, told = pickle.loads(WorkerExtension.rljob_run(worker, cloudpickle.dumps(_fails)))
    assert answer is None
    if isinstance(error, ParticularError):
        assert type(told) is EngineError
        assert str(told) == "ParticularError: code 7"
    else:
        assert type(told) is KeyError
        assert told.args == error.args


PROGRAM = """
import sys
import threading
import time
from rljob_trainer.rollout.actor import EngineSpec, build_engine

folder, tensor, hangs = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def hang(*_):
    print("it hangs", flush=True)
    time.sleep(3600)

if hangs == "loading":
    # In its own processes, which begin with this file too.
    from vllm.v1.worker.cpu_worker import CPUWorker
    CPUWorker.load_model = hang

if __name__ == "__main__":
    arguments = {"kv_cache_memory_bytes": 64 << 20}
    settings = {"tensor_parallel": tensor, "start_seconds": 1234, "engine_args": arguments}
    engine = build_engine(EngineSpec("vllm", folder, own_process=True, **settings))
    from vllm.v1.engine import core_client
    assert core_client.VLLM_ENGINE_READY_TIMEOUT_S == 1234
    engine.core.workers(hang)
"""


@pytest.mark.slow(stands_for="test_a_core_that_is_killed_idle_ends_the_engine_with_its_reason")
@pytest.mark.parametrize(
    ("tensor", "hangs"),
    [(1, "loading"), (2, "asked")],
    ids=["while it loads", "while workers wait for one another"],
)
def test_nothing_stays_when_the_process_that_started_it_is_killed(
    tensor: int, hangs: str, llama_folder: Path, tmp_path: Path
) -> None:
    program = tmp_path / "owner.py"
    program.write_text(PROGRAM)
    pipe = subprocess.PIPE
    # Without what engines of this process have set.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    owner = subprocess.Popen(
        [sys.executable, str(program), str(llama_folder), str(tensor), hangs],
        stdin=pipe,
        stdout=pipe,
        text=True,
        env=environment,
    )
    try:
        assert owner.stdout is not None
        assert any("it hangs" in line for line in owner.stdout)
        inside = below(owner.pid)
        assert len(inside) >= tensor
    finally:
        owner.kill()
        owner.wait()
    assert gone(inside)
