"""Builds the parts of a run from its job, cheapest mistakes first, and says how to take them down again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.algorithms import advantage_estimators
from rljob_trainer.aside import aside
from rljob_trainer.checkpoints.checkpoint import Checkpoints
from rljob_trainer.control.mismatch_limits import MismatchWatch
from rljob_trainer.data.build import training_feed, validation_sets
from rljob_trainer.data.chat import ChatTemplate, response_decoder
from rljob_trainer.driver.closing import closing
from rljob_trainer.driver.critics import critic_of
from rljob_trainer.driver.engines import Engines, PoolTold
from rljob_trainer.driver.judges import judge_count, judges_of
from rljob_trainer.driver.parts import Parts
from rljob_trainer.driver.scorers import scorer_count, scorers_of
from rljob_trainer.driver.starting import start_learner_and_engines
from rljob_trainer.driver.step_speed import StepSpeed
from rljob_trainer.driver.training import PipelineTrainer
from rljob_trainer.environments import environment_of
from rljob_trainer.episodes.environment import Environment
from rljob_trainer.episodes.episode import Group
from rljob_trainer.episodes.group import Decode, GenerationSettings, GroupRollout, Scoring
from rljob_trainer.episodes.identity import ordinals_of
from rljob_trainer.episodes.requests import SamplingSettings
from rljob_trainer.errors import JobFileError
from rljob_trainer.gym.scoring import prepared_gym
from rljob_trainer.learner.protocol import RankedLearner
from rljob_trainer.models.building import check_builds
from rljob_trainer.models.fixed import FixedModel
from rljob_trainer.models.folder import ModelFolder
from rljob_trainer.models.materialise import materialise
from rljob_trainer.models.tokenizer import check_embedded, load_tokenizer
from rljob_trainer.models.weights import check_values
from rljob_trainer.pipeline.loop import Keep, Stage, keep_all
from rljob_trainer.pipeline.shape import schedule_settings
from rljob_trainer.pools.size import engine_count, response_lengths
from rljob_trainer.publish.canaries import Canaries, GuardedPublication
from rljob_trainer.publish.held_weights import HeldWeights
from rljob_trainer.publish.quiet import Publication, QuietPublication
from rljob_trainer.publish.same_weights import ComparedPublication, SameWeights
from rljob_trainer.publish.turns import PublicationInTurns
from rljob_trainer.record.fence import Fence
from rljob_trainer.record.ledger import ENGINE_LOST, Ledger
from rljob_trainer.record.numbers import VersionNumbers
from rljob_trainer.record.start_model import Description
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.standing import ScoringPools
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.telemetry.sinks import Sinks
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.telemetry.view import View
from rljob_trainer.training.checks import TrainedPrompts
from rljob_trainer.training.step import TrainingStep
from rljob_trainer.validation.beside import ValidationBeside
from rljob_trainer.validation.rounds import ValidationRounds
from rljob_trainer.validation.validator import Validator, held_out
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rljob_api.resolved import ResolvedJob, ResolvedSpec
    from rljob_trainer.data.feed import PromptFeed
    from rljob_trainer.episodes.episode import Prompt


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a job reads: models, tokenizer, prompts. Nothing has been started when these are there."""

    model: ModelFolder
    tokenizer: PreTrainedTokenizerBase
    feed: PromptFeed
    validation: dict[str, list[Prompt]]
    decode: Decode
    chat: ChatTemplate
    now: datetime | None = None
    """The date in prompts and questions that have one (None: the present)."""
    critic: FixedModel | None = None
    """What the critic starts from; None: the policy, or there is none."""


def read_inputs(job: ResolvedJob, base: Path, model_folder: Path, now: datetime | None = None) -> Inputs:
    """``base`` is where the job file's relative paths start, ``now`` the date in prompts that have one (None: the
    present). Raises ``JobFileError`` and ``DataError``."""
    spec = job.spec
    model = materialise(spec.model, model_folder, base=base)
    for field, length in response_lengths(spec).items():
        if spec.data.max_prompt_tokens + length > model.context_length:
            raise JobFileError(
                f"{field}: {length} and spec.data.maxPromptTokens = {spec.data.max_prompt_tokens} together exceed the "
                f"model's context of {model.context_length} tokens; lower one of them"
            )
    if model.untrainable is not None and ":" not in spec.trainer.backend:
        raise JobFileError(f"spec.model: the learner {model.untrainable}, see {model.path}; train another model")
    if model.unreplayable is not None and spec.algorithm.routing_replay:
        raise JobFileError(f"spec.algorithm.routingReplay: the model {model.unreplayable}, see {model.path}; remove it")
    check_builds(model.path, trust_remote_code=spec.model.trust_remote_code)
    tokenizer = load_tokenizer(model.path, trust_remote_code=spec.model.trust_remote_code)
    check_embedded(tokenizer, model.vocabulary_size, f"spec.model: the tokenizer in {model.path}")
    critic = critic_of(spec, base, vocabulary=model.vocabulary_size, tokenizer=tokenizer)
    feed = training_feed(spec.data, tokenizer, base=base, epochs=spec.stop.epochs, now=now)
    validation = validation_sets(spec.data, tokenizer, base=base, now=now)
    check_values(model.path)
    chat = ChatTemplate(tokenizer, model.eos_token_ids, now)
    decode = response_decoder(tokenizer, model.eos_token_ids)
    return Inputs(model, tokenizer, feed, validation, decode, chat, now, critic)


async def assemble(
    job: ResolvedJob,
    inputs: Inputs,
    *,
    base: Path,
    episodes: Path,
    records: Path,
    ledger: Ledger,
    shelf: Shelf,
    fence: Fence,
    start_model: Description,
    checkpoints: Checkpoints | None,
    sinks: Sinks,
    view: View,
    times: StageTimes,
    waits: Waits,
    stack: AsyncExitStack,
    by_role: bool = False,
    roll_backs: int = 0,
) -> Parts:
    """Starts reward workers, learner and engines (Ray must run). What was started is closed with ``stack``.

    ``episodes``: the folder for the log of episodes of many turns; ``records``: where rewards
    keep what a run that goes on needs.
    ``by_role``: Ray's nodes say in a label whether they are for ranks or engines. ``roll_backs``: how often this
    process has gone back to a checkpoint.
    """
    spec = job.spec
    environment = await environment_of(spec, inputs.chat, episodes, base, stack, view.message, waits)
    stack.push_async_exit(closing(environment.close))
    if spec.rollout.environment.type != "singleTurn" and inputs.chat.is_there and inputs.chat.drops_history:
        view.message(
            "the chat template renders an answer differently once more turns follow (it may remove thinking), so each "
            "turn is trained on as a separate sequence"
        )
    scorers = scorers_of(spec, waits, by_role=by_role)
    judge = judges_of(spec, base, waits, inputs.now, by_role=by_role)
    for scoring in (scorers, judge):
        if scoring is not None:
            stack.push_async_callback(scoring.close)
    rewards = await stack.enter_async_context(
        RewardPool(
            spec.reward,
            longest_response=spec.rollout.max_response_tokens,
            paths=[base],
            records=records,
            waits=waits,
            scorers=scorers,
            judge=judge,
            gym=prepared_gym(spec.data, base),
        )
    )
    rewards.check_sources([*inputs.feed.source_names, *inputs.validation])
    inputs.feed.begin()
    held = HeldWeights(keeps_first=keeps_first_weights(spec))
    learner, engines = await start_learner_and_engines(
        job,
        inputs.model,
        critic_model=inputs.critic,
        base=base,
        holds=lambda: held.versions,
        shelf=shelf,
        waits=waits,
        stack=stack,
        told=PoolTold(
            worked=times.trace.span,
            made_again=lambda requests: ledger.resampled(ordinals_of(requests), ENGINE_LOST),
        ),
        by_role=by_role,
        report=view.message,
    )
    sampling = training_sampling(spec, inputs)
    step = TrainingStep(
        spec.algorithm,
        spec.batch,
        learner,
        temperature=sampling.temperature,
        seed=spec.seed,
        keeps_first_weights=keeps_first_weights(spec),
        max_prompt_tokens=spec.data.max_prompt_tokens,
        reward=spec.reward,
        stage=learner_stages(spec, times, waits),
        report=view.message,
        prompts=TrainedPrompts(),
    )
    canaries = await canaries_of(spec, inputs, learner, engines, view.message, waits)
    same_weights = same_weights_of(spec, learner, engines, view.message, waits)
    for guard in (same_weights, canaries):
        if guard is not None and engines.admit_by is not None:
            engines.admit_by(guard.admits)
    trainer = PipelineTrainer(
        step,
        publication_of(spec, engines, waits, canaries, same_weights),
        engines.turns,
        undisturbed=engines.undisturbed,
        announce=VersionNumbers(fence, ledger, waits).announce,
        held=held,
    )
    generation = GenerationSettings(
        n=spec.batch.samples_per_prompt,
        sampling=sampling,
        seed=spec.seed,
        greedy=advantage_estimators[spec.algorithm.advantage.estimator].needs_greedy,
        tells_experts=spec.algorithm.routing_replay,
    )
    validator = validator_of(spec, inputs, environment, engines, rewards, sampling, waits)
    validations = None
    if validator is not None:
        validations = ValidationRounds(
            spec,
            validator,
            beside_of(spec, validator, engines, view.message),
            sinks=sinks,
            times=times,
            decode=inputs.decode,
            stops=lambda reward: spec.stop.reward is not None and reward >= spec.stop.reward,
        )
    rollout = GroupRollout(environment, engines.pool, rewards, inputs.decode, generation, waits, rewards.seconds)
    return Parts(
        job=job,
        feed=inputs.feed,
        engines=engines,
        rollout=rollout,
        rewards=rewards,
        corpora=environment.corpora(),
        scoring=ScoringPools(reward_model=scorers, judge=judge),
        learner=learner,
        dtype=learner.dtype,
        step=step,
        trainer=trainer,
        validations=validations,
        schedule=schedule_settings(spec),
        decode=inputs.decode,
        ledger=ledger,
        shelf=shelf,
        fence=fence,
        model=start_model,
        checkpoints=checkpoints,
        sinks=sinks,
        view=view,
        times=times,
        speed=StepSpeed(times, devices(spec), spec.trainer.ranks, spec.batch.epochs, learner.facts),
        waits=waits,
        limits=MismatchWatch(
            spec.algorithm.rollout_correction.limits,
            correct=step.switch_correction_on,
            report=view.message,
            roll_backs=roll_backs,
        ),
        keep=group_filter(spec),
        most_dropped=spec.algorithm.group_filter.max_batches * spec.batch.groups,
    )


def learner_stages(spec: ResolvedSpec, times: StageTimes, waits: Waits) -> Stage:
    """Measures the stages of a training step; in those that are the learner's, the trainer waits for it."""
    ranks = "the learner" if spec.trainer.ranks == 1 else f"the learner's {spec.trainer.ranks} ranks"
    reasons = {
        "score": f"{ranks} to score the batch for the update",
        "update": f"{ranks} to finish the update",
    }

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        reason = reasons.get(name)
        waiting = waits.wait("trainer", reason, float(spec.deadlines.progress_seconds)) if reason else nullcontext()
        with times.stage(name), waiting:
            yield

    return stage


def training_sampling(spec: ResolvedSpec, inputs: Inputs) -> SamplingSettings:
    """How responses are drawn in training. Top-p and top-k are off (the job file is refused otherwise)."""
    return SamplingSettings(
        temperature=spec.rollout.sampling.temperature,
        max_tokens=spec.rollout.max_response_tokens,
        stop_token_ids=inputs.model.eos_token_ids,
    )


def devices(spec: ResolvedSpec) -> int:
    """Devices of all pools: GPUs, or processes where there are none. Colocated engines have none of their own."""
    engines = 0 if spec.placement == "colocated" else engine_count(spec) * max(1, spec.rollout.gpus_per_replica)
    scoring = 0
    for pool, count in ((spec.reward_model, scorer_count(spec)), (spec.judge, judge_count(spec))):
        gpus = 0 if pool is None else pool.gpus_per_replica
        # Beside GPUs the processor of a replica's pod is no device.
        scoring += count * (gpus if spec.trainer.gpus_per_replica else max(1, gpus))
    return spec.trainer.ranks + engines + scoring


async def canaries_of(
    spec: ResolvedSpec,
    inputs: Inputs,
    learner: RankedLearner,
    engines: Engines,
    report: Callable[[str], None],
    waits: Waits,
) -> Canaries | None:
    """The mismatch guard of engines that have weights of their own; None without one."""
    if not spec.weights.canaries or engines.resend is None:
        return None
    prompts = await aside(lambda: inputs.feed.first_prompts(spec.weights.canaries))
    return Canaries(
        learner,
        engines.pool,
        engines.resend,
        [prompt.token_ids for prompt in prompts],
        tolerance=spec.weights.canary_tolerance,
        seconds=float(spec.deadlines.progress_seconds),
        report=report,
        waits=waits,
    )


def keeps_first_weights(spec: ResolvedSpec) -> bool:
    """Whether a version can be trained in several pulls, whatever ``syncEvery`` is: it may be changed at any time."""
    return spec.pipeline.mode == "fullyAsync"


def same_weights_of(
    spec: ResolvedSpec, learner: RankedLearner, engines: Engines, report: Callable[[str], None], waits: Waits
) -> SameWeights | None:
    """None for engines without weights of their own. Where engines take turns on a GPU with the learner, what it trains
    rests in host memory when they can be asked: they are compared with one another."""
    if engines.resend is None:
        return None
    seconds = float(spec.deadlines.progress_seconds)
    return SameWeights(
        None if engines.turns else learner, engines.pool, engines.resend, seconds=seconds, report=report, waits=waits
    )


def publication_of(
    spec: ResolvedSpec, engines: Engines, waits: Waits, canaries: Canaries | None, weights: SameWeights | None = None
) -> Publication:
    """What a publication does to running requests, where there can be any, and what is looked at after it."""
    publication = engines.publication
    if engines.turns is not None:
        # The trainer scores canaries while its actor is on the device anyway; engines need their cache for it.
        asked = [] if canaries is None else [canaries.ask]
        publication = PublicationInTurns(publication, engines.turns, *asked)
    if weights is not None:
        publication = ComparedPublication(publication, weights)
    if canaries is not None:
        publication = GuardedPublication(publication, canaries)
    if spec.pipeline.mode == "sync" or spec.pipeline.partial_rollout == "keepCache":
        return publication
    interrupt = spec.pipeline.partial_rollout == "recompute"
    wait = float(spec.deadlines.progress_seconds)
    return QuietPublication(publication, engines.pool, interrupt=interrupt, seconds=wait, waits=waits)


def beside_of(
    spec: ResolvedSpec, validator: Validator, engines: Engines, report: Callable[[str], None]
) -> ValidationBeside | None:
    """None where engines wait for the trainer anyway, or are not its own processes."""
    if spec.pipeline.mode == "sync" or spec.placement == "colocated":
        return None
    return ValidationBeside(validator, engines.pool, engines.undisturbed, report)


def group_filter(spec: ResolvedSpec) -> Keep:
    """Dynamic sampling (arXiv 2503.14476, section 3.2): groups whose samples all have the same score are replaced."""
    if not spec.algorithm.group_filter.drop_uniform:
        return keep_all

    def keep(group: Group) -> str | None:
        scores = {episode.reward.score for episode in group.episodes if episode.reward is not None}
        return "all samples have the same score" if len(scores) < 2 else None

    return keep


def validator_of(
    spec: ResolvedSpec,
    inputs: Inputs,
    environment: Environment,
    engines: Engines,
    rewards: RewardPool,
    training: SamplingSettings,
    waits: Waits | None = None,
) -> Validator | None:
    """None when the job has no validation set."""
    if not inputs.validation:
        return None
    sets = [held_out(part, inputs.validation[part.name], training) for part in spec.data.validation]
    return Validator(
        environment,
        engines.pool,
        Scoring(rewards, inputs.decode),
        sets,
        seed=spec.seed,
        bootstrap=spec.validation.bootstrap,
        waits=waits,
        patience_seconds=float(spec.deadlines.progress_seconds),
    )
