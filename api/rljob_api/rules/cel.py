"""The vocabulary of the rules' CEL: what an entry is, the places where entries stand, and shared expressions.

The expressions say what a preset, a method or a default makes of an absent field. They mirror ``rljob_api.resolution``;
a test sends the same jobs to both. The parameters ``algorithm`` and ``trainer`` are the expressions of spec.algorithm
and spec.trainer, which differ with the place of a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.method import MethodSpec
from rljob_api.methods import ESTIMATORS, POLICY_LOSSES
from rljob_api.presets import PRESETS, Preset
from rljob_api.schema import find
from rljob_api.spec.pipeline import DEFAULT_ASYNC_MINI_BATCH_GROUPS, DEFAULT_GROUPS

Path = tuple[str, ...]
"""Names of fields; ``[]`` stands for the items of a list, ``{}`` for the values of a map."""


@dataclass(frozen=True)
class Cel:
    """One entry of x-kubernetes-validations: where it stands, what has to be true there, and the field it blames."""

    at: Path
    expression: str
    message: str
    """The problem and the remedy, as the API server tells it; without values, which CEL's messages can't carry here."""
    field: str = ""
    """Its path from ``at``, with a leading point; empty: ``at`` itself."""


ROOT: Path = ()
SPEC: Path = ("spec",)
MODEL: Path = ("spec", "model")
RANDOM: Path = (*MODEL, "random")
DATA: Path = ("spec", "data")
TRAIN: Path = ("spec", "data", "train")
VALIDATION: Path = ("spec", "data", "validation", "[]")
REWARD: Path = ("spec", "reward")
FUNCTION: Path = (*REWARD, "functions", "[]")
ALGORITHM: Path = ("spec", "algorithm")
CORRECTION: Path = (*ALGORITHM, "rolloutCorrection")
TRAINER: Path = ("spec", "trainer")
POOLS = ("rollout", "trainer", "rewardModel", "judge")
ENGINE_POOLS = ("rollout", "judge")
PODS: tuple[Path, ...] = tuple(("spec", role, "pod") for role in (*POOLS, "head"))

COMPARING = [name for name, method in ESTIMATORS.items() if method.compares_samples]
WITH_CRITIC = [name for name, method in ESTIMATORS.items() if method.needs_critic]
BYPASSING = [name for name, method in POLICY_LOSSES.items() if method.needs_bypass]


def text(value: str) -> str:
    """A CEL string."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def given(field: str, otherwise: str) -> str:
    """The field if it is there, else another expression."""
    return f"(has({field}) ? {field} : {otherwise})"


def in_force(field: str) -> str:
    """A number of spec as resolution has it: the field if it is there, else what its absence means."""
    node = find(["spec", *field.split(".")[1:]])
    assert node is not None, field
    assert node.fallback is not None, f"{field} has no one fallback"
    return given(field, str(node.fallback))


def is_absent(section: str) -> str:
    """The beginning of what is said of a section of spec, to which "or" is added: that it is not there. Empty for one
    that always is."""
    node = find(["spec", section])
    assert node is not None, section
    return "" if node.required or node.has_default else f"!has(self.{section}) || "


def exactly_one(*fields: str) -> str:
    """Whether just one of several fields is there."""
    listed = ", ".join(f"has({field})" for field in fields)
    return f"[{listed}].filter(x, x).size() == 1"


def brief(path: str, expression: str, name: str = "c") -> str:
    """The expression with a short name for a path that it has many times: the CRD may not grow."""
    return f"[{path}].all({name}, {expression.replace(path, name)})"


def one_of(values: Iterable[str]) -> str:
    """A CEL list of texts."""
    return "[" + ", ".join(map(text, values)) + "]"


def table(values: Mapping[str, float]) -> str:
    """A CEL map from text to doubles (floats keep their point: CEL does not compare integers with doubles)."""
    return "{" + ", ".join(f"{text(key)}: {value!r}" for key, value in values.items()) + "}"


def among(field: str, values: Iterable[str]) -> str:
    """Whether a text field is one of these."""
    values = list(values)
    return f"{field} == {text(values[0])}" if len(values) == 1 else f"{field} in {one_of(values)}"


def preset_in(algorithm: str, fits: Callable[[Preset], bool]) -> str:
    """Whether the job's preset is one of those that fit; empty if none does."""
    fitting = [name for name, preset in PRESETS.items() if fits(preset)]
    return among(f"{algorithm}.preset", fitting) if fitting else ""


def _in_force(field: str, names: Iterable[str], by_preset: str) -> str:
    """Whether a method is one of these: the one that the job names, else its preset's."""
    named = among(field, names)
    return f"(has({field}) ? {named} : {by_preset})" if by_preset else f"(has({field}) && {named})"


def estimator_in(algorithm: str, names: Iterable[str]) -> str:
    """Whether the estimator in force is one of these."""
    names = list(names)
    field = f"{algorithm}.advantage.estimator"
    return _in_force(field, names, preset_in(algorithm, lambda preset: preset.algorithm.advantage.estimator in names))


def loss_in(algorithm: str, names: Iterable[str]) -> str:
    """Whether the policy loss in force is one of these."""
    names = list(names)
    field = f"{algorithm}.policyLoss.type"
    return _in_force(field, names, preset_in(algorithm, lambda preset: preset.algorithm.policy_loss.type in names))


def takers(parameter: str, methods: Mapping[Any, MethodSpec]) -> list[str]:
    """The methods that take a parameter (snake_case)."""
    return [name for name, method in methods.items() if parameter in method.parameters]


def loss_parameter(parameter: str, field: str, algorithm: str) -> str:
    """A numeric parameter of the policy loss in force: the job's, the preset's if its loss is the chosen one, or the
    method's own default; 0 stands for "off". To be used only where the loss takes the parameter."""
    chosen = f"{algorithm}.policyLoss.type"
    own = {
        str(name): float(method.parameters[parameter] or 0.0)
        for name, method in POLICY_LOSSES.items()
        if parameter in method.parameters
    }
    presets = {}
    for name, preset in PRESETS.items():
        loss = str(preset.algorithm.policy_loss.type)
        if loss in own:
            value = getattr(preset.algorithm.policy_loss, parameter)
            presets[str(name)] = own[loss] if value is None else float(value)
    # Choosing the preset's own loss by name changes nothing, so its parameters stay.
    by_loss = {
        loss: [name for name, entry in PRESETS.items() if entry.algorithm.policy_loss.type == loss] for loss in own
    }
    same = " || ".join(
        f"({chosen} == {text(loss)} && {among(f'{algorithm}.preset', names)})"
        for loss, names in by_loss.items()
        if names
    )
    otherwise = f"{table(own)}[{chosen}]"
    if presets:
        otherwise = f"(!has({chosen}) || {same} ? {table(presets)}[{algorithm}.preset] : {otherwise})"
    return given(f"{algorithm}.policyLoss.{field}", otherwise)


# What follows is said of spec.
_ALGORITHM = "self.algorithm"
_COUNTS = sorted({preset.samples_per_prompt for preset in PRESETS.values()}, reverse=True)


def _preset_samples() -> str:
    expression = str(_COUNTS[0])
    for count in _COUNTS[1:]:
        names = [name for name, preset in PRESETS.items() if preset.samples_per_prompt == count]
        expression = f"{_ALGORITHM}.preset in {one_of(names)} ? {count} : {expression}"
    return f"({expression})"


SAMPLES = given("self.batch.samplesPerPrompt", _preset_samples())
IS_ASYNC = "self.pipeline.mode == 'fullyAsync'"
MINI = (
    f"({IS_ASYNC} ? {given('self.batch.miniBatchGroups', str(DEFAULT_ASYNC_MINI_BATCH_GROUPS))} : "
    f"{given('self.batch.miniBatchGroups', given('self.batch.groups', str(DEFAULT_GROUPS)))})"
)
GROUPS = given("self.batch.groups", str(DEFAULT_GROUPS))
UPDATE = (
    f"({IS_ASYNC} ? {in_force('self.pipeline.requireBatches')} * "
    f"{given('self.batch.miniBatchGroups', str(DEFAULT_ASYNC_MINI_BATCH_GROUPS))} : {GROUPS})"
)
PULL = f"{in_force('self.pipeline.syncEvery')} * {in_force('self.pipeline.requireBatches')} * {MINI}"
IS_COLOCATED = (
    "(has(self.placement) ? self.placement == 'colocated' : "
    "self.pipeline.mode == 'sync' && !has(self.rollout.replicas))"
)
ENGINES_HAVE_GPUS = f"(({IS_COLOCATED} ? self.trainer.gpusPerReplica : self.rollout.gpusPerReplica) > 0)"
REPLICAS = in_force("self.rollout.replicas")
HAS_NO_TEMPLATE = (
    "(has(self.model.random) && has(self.model.random.tokenizer.characters) && !has(self.model.chatTemplate))"
)
_MODE = "self.algorithm.rolloutCorrection.mode"
_NAMED = "self.algorithm.rolloutCorrection.preset"
IS_WITHOUT_CORRECTION = (
    f"(has({_MODE}) ? {_MODE} == 'none' : !has({_NAMED}) && self.pipeline.mode == 'sync' && "
    f"!{loss_in(_ALGORITHM, BYPASSING)})"
)
IS_BYPASS = (
    f"(has({_MODE}) ? {_MODE} == 'bypass' : has({_NAMED}) ? {_NAMED}.startsWith('bypass') : "
    f"self.pipeline.mode != 'sync' || {loss_in(_ALGORITHM, BYPASSING)})"
)
STEPS_GIVEN = "(has(self.stop) && has(self.stop.steps))"


def ranks(trainer: str) -> str:
    """Number of trainer processes."""
    return f"{trainer}.replicas * ({trainer}.gpusPerReplica > 0 ? {trainer}.gpusPerReplica : 1)"


def shards(trainer: str) -> str:
    """parallelism.shard in force."""
    ways = f"{trainer}.parallelism"
    fit = f"{ranks(trainer)} / ({ways}.replicate * {ways}.context * {ways}.tensor)"
    return given(f"{ways}.shard", f"({fit} > 0 ? {fit} : 1)")
