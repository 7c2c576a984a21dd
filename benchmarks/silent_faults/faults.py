"""The faults. Each is one small patch of a running job, beneath whatever looks for it, with the words that would be
right: ``named`` was written before anybody looked at what the run says."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.silent_faults.here import Injection, Watched, attempt, job
from rljob_trainer.checkpoints import folder as checkpoint_folder
from rljob_trainer.data.feed import PromptFeed
from rljob_trainer.episodes.group import GroupRollout
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.learner.optim import Optimizer, StepOutcome
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.pools.dispatch import Dispatch
from rljob_trainer.rewards.frames import Scored
from rljob_trainer.rewards.process import _Progress
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.training import step as training_step

AT = 2
"""The step in which faults strike."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``named``: a pattern that the first sentence after the fault must match. ``fast``: part of the shortened form."""

    name: str
    what: str
    named: str
    inject: Injection | None = None
    between: Callable[[Path], None] | None = None
    """What happens to the folder between two attempts, of which the second is looked at."""
    spec: dict[str, Any] = field(default_factory=dict)
    fast: bool = True
    would_take: str = ""
    """For a fault that is not named today: what it would take."""


FAULTS: dict[str, Fault] = {}


def fault(named: str, **more: Any) -> Callable[[Any], Any]:
    """Registers a fault under its function's name; the docstring says what it is."""

    def register(function: Any) -> Any:
        what = " ".join((function.__doc__ or "").split())
        made = Fault(function.__name__.replace("_", "-"), what, named, contextmanager(function), **more)
        FAULTS[made.name] = made
        return function

    return register


def between(named: str, **more: Any) -> Callable[[Any], Any]:
    """The same for what happens to the folder between two attempts."""

    def register(function: Any) -> Any:
        what = " ".join((function.__doc__ or "").split())
        made = Fault(function.__name__.replace("_", "-"), what, named, between=function, **more)
        FAULTS[made.name] = made
        return function

    return register


def on_engine(number: int) -> bool:
    """Whether this is the thread of that engine."""
    return threading.current_thread().name == f"engine-{number}"


def due(watched: Watched, step: int = AT) -> bool:
    """Whether the fault is to strike now; it does so once."""
    return watched.struck is None and watched.step >= step


# --- weights ---------------------------------------------------------------------------------------------------------


def _parameters(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return engine._decoder.tensors


@contextmanager
def _after_receiving(change: Callable[[TorchEngine, dict[str, torch.Tensor]], None], *engines: int) -> Iterator[None]:
    """``change`` is called with an engine and its former weights, once it has received and verified new ones."""
    real = TorchEngine.receive_weights

    def receive(self: TorchEngine, *args: Any) -> Any:
        former = {name: tensor.clone() for name, tensor in _parameters(self).items()}
        report = real(self, *args)
        if any(map(on_engine, engines)):
            change(self, former)
        return report

    with patch.object(TorchEngine, "receive_weights", receive):
        yield


def _put_back(engine: TorchEngine, former: dict[str, torch.Tensor]) -> None:
    for name, tensor in _parameters(engine).items():
        tensor.copy_(former[name])


@fault(r"engine 0\b.*still has the weights of version 1")
def stale_weights_in_one_engine(watched: Watched) -> Iterator[None]:
    """One engine goes on with the former weights under the new number."""

    def change(engine: TorchEngine, former: dict[str, torch.Tensor]) -> None:
        if due(watched):
            watched.strike()
            _put_back(engine, former)

    with _after_receiving(change, 0):
        yield


@fault(r"engine [01]\b.*still has the weights of version 1", fast=False)
def stale_weights_in_all_engines(watched: Watched) -> Iterator[None]:
    """All engines go on with the former weights under the new number."""
    left = {0, 1}

    def change(engine: TorchEngine, former: dict[str, torch.Tensor]) -> None:
        mine = next(number for number in (0, 1) if on_engine(number))
        if mine in left and watched.step >= AT:
            watched.strike()
            left.discard(mine)
            _put_back(engine, former)

    with _after_receiving(change, 0, 1):
        yield


@fault(r"engine 1\b.*mlp\.up_proj.*same values in another order", fast=False)
def rows_swapped_in_an_engine(watched: Watched) -> Iterator[None]:
    """Two rows of a matrix change places in an engine, after the publication was verified."""

    def change(engine: TorchEngine, former: dict[str, torch.Tensor]) -> None:
        if due(watched):
            watched.strike()
            matrix = _parameters(engine)["model.layers.0.mlp.up_proj.weight"]
            matrix[[3, 4]] = matrix[[4, 3]]

    with _after_receiving(change, 1):
        yield


@fault(r"engine 1\b.*layers\.0\.self_attn\.q_proj.*contains.*layers\.1\.self_attn\.q_proj")
def tensors_swapped_in_an_engine(watched: Watched) -> Iterator[None]:
    """Two matrices of one shape change places in an engine, after the publication was verified."""

    def change(engine: TorchEngine, former: dict[str, torch.Tensor]) -> None:
        if due(watched):
            watched.strike()
            first, second = (_parameters(engine)[f"model.layers.{n}.self_attn.q_proj.weight"] for n in (0, 1))
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)

    with _after_receiving(change, 1):
        yield


@fault(r"engine [01]\b.*mlp\.up_proj.*same values in another order")
def rows_swapped_by_the_sender(watched: Watched) -> Iterator[None]:
    """Two rows change places while the learner gathers a matrix: what is sent is what arrives, and is wrong."""
    real = LearnerRank.named_parameters_for_publish

    def gather(self: LearnerRank) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in real(self):
            if name == "model.layers.0.mlp.up_proj.weight" and watched.step == AT and sending:
                watched.strike()
                tensor = tensor.detach().clone()
                tensor[[3, 4]] = tensor[[4, 3]]
            yield name, tensor

    from rljob_trainer.weights import learner_side

    real_publish, sending = learner_side._publish, []

    def publish(rank: Any, version: int, timeout: float) -> Any:
        sending.append(version)
        try:
            return real_publish(rank, version, timeout)
        finally:
            sending.clear()

    with (
        patch.object(LearnerRank, "named_parameters_for_publish", gather),
        patch.object(learner_side, "_publish", publish),
    ):
        yield


@fault(r"engine 0\b.*embed_tokens.*changed .*since")
def an_engine_whose_memory_changes(watched: Watched) -> Iterator[None]:
    """One number of an engine's weights changes while it samples."""
    real = TorchEngine.step

    def step(self: TorchEngine) -> Any:
        if on_engine(0) and due(watched):
            watched.strike()
            _parameters(self)["model.embed_tokens.weight"].view(-1)[7] += 1.0
        return real(self)

    with patch.object(TorchEngine, "step", step):
        yield


@fault(r"sample \d+ of prompt \d+.*version")
def tokens_under_a_version_that_never_was(watched: Watched) -> Iterator[None]:
    """An engine writes another version onto its tokens than that which made them."""
    real = TorchEngine.step

    def step(self: TorchEngine) -> Any:
        results = real(self)
        if results and on_engine(0) and due(watched):
            watched.strike()
            tokens = results[0].tokens
            results[0].tokens = replace(tokens, versions=tokens.versions + np.int32(1))
        return results

    with patch.object(TorchEngine, "step", step):
        yield


# --- the learner's memory --------------------------------------------------------------------------------------------


@contextmanager
def _before_update(change: Callable[..., None]) -> Iterator[None]:
    """``change`` is called with a rank and its share before each update."""
    real = LearnerRank.update

    def update(self: LearnerRank, share: Any, *args: Any, **kwargs: Any) -> Any:
        change(self, share)
        return real(self, share, *args, **kwargs)

    with patch.object(LearnerRank, "update", update):
        yield


@fault(r"actor\.model\..*changed in memory after the last update", fast=False)
def a_policy_that_changes_between_updates(watched: Watched) -> Iterator[None]:
    """One number of the policy changes in the learner's memory between two updates."""

    def change(rank: LearnerRank, share: Any) -> None:
        if due(watched):
            watched.strike()
            with torch.no_grad():
                next(iter(rank._policy.parameters())).view(-1)[5] += 0.25

    with _before_update(change):
        yield


@fault(r"reference.*(changed|moved)")
def a_reference_that_moves(watched: Watched) -> Iterator[None]:
    """The frozen reference gets the policy's present weights."""

    def change(rank: LearnerRank, share: Any) -> None:
        if due(watched):
            watched.strike()
            assert rank._reference is not None
            with torch.no_grad():
                for theirs, ours in zip(rank._reference.parameters(), rank._policy.parameters(), strict=True):
                    theirs.copy_(ours)

    with _before_update(change):
        yield


@fault(r"actor\.optimizer\..*changed in memory after the last update")
def moments_that_are_lost(watched: Watched) -> Iterator[None]:
    """The optimizer's moments of one matrix are zeroed between two updates."""

    def change(rank: LearnerRank, share: Any) -> None:
        if due(watched):
            watched.strike()
            state = rank.actor.optimizer.state()
            next(shard.tensor for shard in state if shard.name.endswith("exp_avg")).zero_()

    with _before_update(change):
        yield


@fault(r"actor's optimizer steps changed none of")
def an_optimizer_step_that_is_not_taken(watched: Watched) -> Iterator[None]:
    """The optimizer reports a gradient norm and moves nothing."""
    real = Optimizer.step

    def step(self: Optimizer, rate: float) -> StepOutcome:
        if watched.step == AT:
            watched.strike()
            self.clear()
            return StepOutcome(1.0)
        return real(self, rate)

    with patch.object(Optimizer, "step", step):
        yield


@fault(r"actor.*optimizer step.*(left|did not change).*q_proj", fast=False)
def a_matrix_that_is_not_trained(watched: Watched) -> Iterator[None]:
    """One matrix gets no gradient."""
    real = Optimizer.step

    def step(self: Optimizer, rate: float) -> StepOutcome:
        if watched.step >= AT:
            watched.strike()
            name = next(name for name in self._named if "layers.1" in name and "q_proj" in name)
            self._named[name].grad = None
        return real(self, rate)

    with patch.object(Optimizer, "step", step):
        yield


# --- from engine to trainer ------------------------------------------------------------------------------------------


@contextmanager
def _in_results(change: Callable[[Any, list[Any]], bool], watched: Watched) -> Iterator[None]:
    """``change`` is given an engine and what it has finished, inside the engine; says whether it changed anything."""
    real = TorchEngine.step

    def step(self: TorchEngine) -> Any:
        results = real(self)
        if results and watched.step == AT and change(self, results):
            watched.strike()
        return results

    with patch.object(TorchEngine, "step", step):
        yield


@fault(r"temperature 1\b")
def log_probs_of_another_temperature(watched: Watched) -> Iterator[None]:
    """Engines draw at the job's temperature and report log-probs at 1."""
    asked: dict[EpisodeId, tuple[int, ...]] = {}
    real = TorchEngine.add

    def add(self: TorchEngine, request: Any) -> None:
        asked[request.id] = request.prompt_ids
        real(self, request)

    def change(engine: Any, results: list[Any]) -> bool:
        pairs = [(asked[result.id], result.tokens.ids.tolist()) for result in results]
        for result, scored in zip(results, engine.score(pairs, 1.0), strict=True):
            result.tokens = replace(result.tokens, log_probs=scored)
        return True

    with patch.object(TorchEngine, "add", add), _in_results(change, watched):
        yield


@fault(r"log-probs?.*(shifted|one (token|place))")
def log_probs_that_are_off_by_one(watched: Watched) -> Iterator[None]:
    """Engines report each token's log-prob one place too late."""

    def change(engine: Any, results: list[Any]) -> bool:
        for result in results:
            result.tokens = replace(result.tokens, log_probs=np.roll(result.tokens.log_probs, 1))
        return True

    with _in_results(change, watched):
        yield


@contextmanager
def _on_the_way_to_an_engine(change: Callable[[list[Any]], list[Any]], watched: Watched) -> Iterator[None]:
    real = EngineLoop.submit

    def submit(self: EngineLoop, requests: Any) -> None:
        if due(watched, AT - 1) and watched.parts is not None and watched.step == AT - 1:
            watched.step = AT  # the requests of the next step
            watched.strike()
            requests = change(list(requests))
        real(self, requests)

    with patch.object(EngineLoop, "submit", submit):
        yield


@fault(r"temperature 1\.3")
def requests_of_another_temperature(watched: Watched) -> Iterator[None]:
    """Requests reach an engine with another temperature than they were sent with."""

    def change(requests: list[Any]) -> list[Any]:
        return [replace(r, sampling=replace(r.sampling, temperature=1.3)) for r in requests]

    with _on_the_way_to_an_engine(change, watched):
        yield


@fault(r"sample \d+ of prompt \d+.*another prompt", fast=False)
def requests_with_another_prompt(watched: Watched) -> Iterator[None]:
    """Two groups' requests reach an engine with each other's prompt."""

    def change(requests: list[Any]) -> list[Any]:
        first, second = requests[0].prompt_ids, requests[4].prompt_ids
        swapped = {first: second, second: first}
        return [replace(r, prompt_ids=swapped.get(r.prompt_ids, r.prompt_ids)) for r in requests]

    with _on_the_way_to_an_engine(change, watched):
        yield


@contextmanager
def _on_arrival(change: Callable[[list[Any]], None], watched: Watched) -> Iterator[None]:
    """``change`` is given some results when they have reached the driver."""
    real = Dispatch._resolve

    def resolve(self: Dispatch, member: Any, results: Any) -> None:
        results = list(results)
        if len(results) > 7 and watched.step == AT - 1 and watched.struck is None and not self.paused:
            watched.step = AT
            watched.strike()
            change(results)
        real(self, member, results)

    with patch.object(Dispatch, "_resolve", resolve):
        yield


@fault(r"log-probs of sample \d+ of prompt \d+ differ from", fast=False)
def log_probs_of_two_samples_swapped(watched: Watched) -> Iterator[None]:
    """Two samples get each other's log-probs on their way to the trainer."""

    def change(results: list[Any]) -> None:
        pairs = ((a, b) for a in results for b in results if len(a.tokens) == len(b.tokens) and a is not b)
        a, b = next((a, b) for a, b in pairs if a.tokens.log_probs.tolist() != b.tokens.log_probs.tolist())
        ours, theirs = a.tokens, b.tokens
        a.tokens, b.tokens = replace(ours, log_probs=theirs.log_probs), replace(theirs, log_probs=ours.log_probs)

    with _on_arrival(change, watched):
        yield


@fault(r"sample \d+ of prompt \d+ holds the response of sample \d+ of prompt \d+")
def two_samples_swapped(watched: Watched) -> Iterator[None]:
    """Two samples get each other's rows (tokens, log-probs, versions) on their way to the trainer."""

    def change(results: list[Any]) -> None:
        a, b = results[0], next(r for r in results[1:] if r.tokens.ids.tolist() != results[0].tokens.ids.tolist())
        a.id, b.id = b.id, a.id

    with _on_arrival(change, watched):
        yield


@fault(r"sample \d+ of prompt \d+ holds the response of sample \d+ of prompt \d+", fast=False)
def a_sample_doubled(watched: Watched) -> Iterator[None]:
    """A sample is replaced by a copy of its sibling on the way to the trainer."""

    def change(results: list[Any]) -> None:
        a = results[0]
        b = next(r for r in results[1:] if r.tokens.ids.tolist() != a.tokens.ids.tolist())
        id = b.id
        for field_name in a.__dataclass_fields__:
            setattr(b, field_name, getattr(a, field_name))
        b.id = id

    with _on_arrival(change, watched):
        yield


@fault(r"token ids of sample \d+ of prompt \d+ differ from")
def a_turn_doubled(watched: Watched) -> Iterator[None]:
    """The tokens of a response come twice, with everything that belongs to them."""

    def change(results: list[Any]) -> None:
        a = results[0]
        a.tokens = Tokens.joined([a.tokens, a.tokens])

    with _on_arrival(change, watched):
        yield


# --- in the trainer --------------------------------------------------------------------------------------------------


@contextmanager
def _in_layout(change: Callable[[Any], None], watched: Watched) -> Iterator[None]:
    real = training_step.layout

    def layout(groups: Any) -> Any:
        batch = real(groups)
        if due(watched):
            watched.strike()
            change(batch)
        return batch

    with patch.object(training_step, "layout", layout):
        yield


@fault(r"mask of sample \d+ of prompt \d+")
def a_mask_off_by_one(watched: Watched) -> Iterator[None]:
    """The mask of every response is one place late, so that first tokens are not trained."""

    def change(batch: Any) -> None:
        mask = batch.sequences.mask.copy()
        mask[batch.offsets[:-1]] = False
        object.__setattr__(batch.sequences, "mask", mask)  # a value that nobody may change

    with _in_layout(change, watched):
        yield


@fault(r"advantages of .*sequence")
def advantages_of_two_sequences_swapped(watched: Watched) -> Iterator[None]:
    """Two sequences get each other's advantages on their way to a rank."""

    def change(rank: LearnerRank, share: Any) -> None:
        if due(watched):
            watched.strike()
            stream = share.batch.advantages
            best, worst = int(stream.argmax()), int(stream.argmin())
            changed = stream.copy()
            changed[[best, worst]] = stream[[worst, best]]
            object.__setattr__(share.batch, "advantages", changed)  # a value that nobody may change

    with _before_update(change):
        yield


@fault(r"token ids of .*sequence", fast=False)
def tokens_that_change_on_the_way_to_a_rank(watched: Watched) -> Iterator[None]:
    """A token of a sequence is another one when it reaches the rank."""

    def change(rank: LearnerRank, share: Any) -> None:
        if due(watched):
            watched.strike()
            ids = share.batch.token_ids.copy()
            ids[9] = (ids[9] + 1) % 11
            object.__setattr__(share.batch, "token_ids", ids)  # a value that nobody may change

    with _before_update(change):
        yield


@fault(r"prompt \d+ is in the batch of step \d+ twice", fast=False)
def a_group_doubled(watched: Watched) -> Iterator[None]:
    """A group stands in a batch twice, in the place of another."""
    real = training_step.TrainingStep.run

    async def run(self: Any, groups: Any, *, number: int, version: int) -> Any:
        if due(watched):
            watched.strike()
            groups = [groups[0], groups[0], *groups[2:]]
        return await real(self, groups, number=number, version=version)

    with patch.object(training_step.TrainingStep, "run", run):
        yield


@fault(r"prompt \d+ .*(again|was trained in step 1)")
def a_group_trained_again(watched: Watched) -> Iterator[None]:
    """A group of the step before is trained once more, in the place of another."""
    real = training_step.TrainingStep.run
    former: list[Any] = []

    async def run(self: Any, groups: Any, *, number: int, version: int) -> Any:
        if due(watched) and former:
            watched.strike()
            groups = [former[0], *groups[1:]]
        former[:] = groups
        return await real(self, groups, number=number, version=version)

    with patch.object(training_step.TrainingStep, "run", run):
        yield


@fault(r"prompts? .*skipped")
def a_prompt_skipped(watched: Watched) -> Iterator[None]:
    """The feed passes over a row without a word."""
    real = PromptFeed.next

    def following(self: PromptFeed) -> Any:
        if due(watched, AT - 1):
            watched.strike()
            self._position += 1
        return real(self)

    with patch.object(PromptFeed, "next", following):
        yield


@contextmanager
def _in_rewards(change: Callable[[Any, list[Any]], list[Any]], watched: Watched) -> Iterator[None]:
    """``change`` is given a group's rewards when they come from the reward functions."""
    real = GroupRollout.__init__

    def init(self: Any, environment: Any, engines: Any, rewards: Any, *args: Any, **kwargs: Any) -> None:
        score = rewards.score

        async def scored(group: Any) -> list[Any]:
            results = await score(group)
            if watched.step >= AT - 1 and watched.struck is None:
                changed = change(group, list(results))
                if changed != results:
                    watched.step = max(watched.step, AT)
                    watched.strike()
                    return changed
            return list(results)

        rewards.score = scored
        real(self, environment, engines, rewards, *args, **kwargs)

    with patch.object(GroupRollout, "__init__", init):
        yield


@fault(r"reward of sample \d+ of prompt \d+ .*sample \d+ of prompt \d+")
def rewards_of_siblings_swapped(watched: Watched) -> Iterator[None]:
    """The best and the worst sample of a group get each other's reward."""

    def change(group: Any, results: list[Any]) -> list[Any]:
        order = sorted(range(len(results)), key=lambda i: results[i].score)
        results[order[0]], results[order[-1]] = results[order[-1]], results[order[0]]
        return results

    with _in_rewards(change, watched):
        yield


@fault(r"reward of sample \d+ of prompt \d+ .*sample \d+ of prompt \d+", fast=False)
def rewards_of_another_prompt(watched: Watched) -> Iterator[None]:
    """A group gets the rewards of the group before."""
    former: list[list[Any]] = []

    def change(group: Any, results: list[Any]) -> list[Any]:
        former.append(results)
        return former[0] if len(former) > 1 else results

    with _in_rewards(change, watched):
        yield


@fault(
    r"reward of sample \d+ of prompt \d+",
    spec={"reward": {"functions": [{"type": "custom", "function": "graded:graded"}], "workers": 1}},
)
def rewards_swapped_by_a_worker(watched: Watched) -> Iterator[None]:
    """A worker process answers for two responses in the wrong order."""
    real = _Progress.note

    def note(self: _Progress, messages: Any) -> None:
        told = list(messages)
        scored = [i for i, message in enumerate(told) if isinstance(message, Scored)]
        if due(watched, AT - 1) and len(scored) > 1:
            watched.step = max(watched.step, AT)
            watched.strike()
            places = [told[i].sample for i in scored]
            for i, place in zip(scored, reversed(places), strict=True):
                told[i] = told[i]._replace(sample=place)
        real(self, told)

    with patch.object(_Progress, "note", note):
        yield


# --- between two attempts --------------------------------------------------------------------------------------------


def _newest(folder: Path) -> Path:
    return max((folder / "output" / "checkpoints").glob("step-*"))


def _sealed_again(checkpoint: Path) -> None:
    """What was put into a checkpoint is in its manifest, as a backup tool that makes its own would have it."""
    step = json.loads((checkpoint / "manifest.json").read_text())["step"]
    (checkpoint / "manifest.json").unlink()
    checkpoint_folder._seal(checkpoint, step)


def _other_run(folder: Path, **spec: Any) -> Path:
    """The newest checkpoint of another run of the same job with another seed."""
    other = folder / "other"
    other.mkdir()
    watched = Watched()
    attempt(job(stop={"steps": 2}, seed=77, **spec), other, watched)
    return _newest(other)


@between(r"actor\.optimizer.*(another|not (that|what|those|the))")
def an_optimizer_of_another_run(folder: Path) -> None:
    """The moments in a checkpoint are replaced by those of another run, in the learner's files."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    def read(place: Path) -> dict[str, torch.Tensor]:
        metadata = FileSystemReader(place).read_metadata()
        state = {
            name: torch.empty(tuple(m.size), dtype=m.properties.dtype)  # type: ignore[union-attr]
            for name, m in metadata.state_dict_metadata.items()
        }
        load(state, storage_reader=FileSystemReader(place), no_dist=True)
        return state

    mine, other = _newest(folder) / "learner", _other_run(folder) / "learner"
    state, theirs = read(mine), read(other)
    for name in state:
        if ".optimizer." in name:
            state[name] = theirs[name]
    for file in [*mine.glob("*.distcp"), mine / ".metadata"]:
        file.unlink()
    save(state, storage_writer=FileSystemWriter(mine), no_dist=True)
    _sealed_again(_newest(folder))


@between(r"learner.*(belongs to|of) (another|run|step)", fast=False)
def a_learner_of_another_run(folder: Path) -> None:
    """The whole learner's part of a checkpoint is replaced by another run's."""
    mine, other = _newest(folder) / "learner", _other_run(folder) / "learner"
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    _sealed_again(_newest(folder))


@between(r"ledger.*(trained|groups)")
def a_ledger_of_another_step(folder: Path) -> None:
    """The ledger in a checkpoint is replaced by that of the checkpoint before."""
    newest = _newest(folder)
    before = sorted((folder / "output" / "checkpoints").glob("step-*"))[-2]
    shutil.copy(before / "ledger.sqlite", newest / "ledger.sqlite")
    _sealed_again(newest)


@between(
    r"(template|tokenised)",
    spec={
        "data": {
            "train": {"source": "rows.jsonl"},
            "prompt": "question",
            "answer": "answer",
            "maxPromptTokens": 8,
        }
    },
)
def a_template_that_drifts(folder: Path) -> None:
    """The tokenizer's files change between two attempts: prompts begin with one more token."""
    tokenizer = folder / "output" / "start" / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    tokenizer.write_text(json.dumps(content))


@between(
    r"row \d+ of data source",
    spec={
        "data": {
            "train": {"source": "rows.jsonl"},
            "prompt": "question",
            "answer": "answer",
            "maxPromptTokens": 8,
        }
    },
    fast=False,
)
def an_answer_that_changes(folder: Path) -> None:
    """The answer in one row of the data file is another one in the next attempt."""
    file = folder / "rows.jsonl"
    rows = file.read_text().splitlines()
    row = json.loads(rows[5])
    row["answer"] = "99"
    rows[5] = json.dumps(row)
    file.write_text("\n".join(rows) + "\n")


def prepare(folder: Path) -> None:
    """The files that jobs name."""
    rows = [{"question": f"{n:02d}=", "answer": f"{n:02d}"} for n in range(80)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "graded.py").write_text(
        "def graded(response, answer):\n"
        "    return sum(a == b for a, b in zip(response, answer)) + 0.01 * len(response)\n"
    )
