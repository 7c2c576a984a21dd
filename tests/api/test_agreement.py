"""The API's tables and the code that they describe: names, parameters and defaults must agree."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from rljob_api.engine_args import ENGINE_ARGS, SET_BY_RLJOB
from rljob_api.methods import ESTIMATORS, POLICY_LOSSES
from rljob_api.spec.algorithm import AggregationType, KlLossKind, KlRewardKind
from rljob_api.spec.data import TaskType
from rljob_api.spec.reward import RewardType

FROM_ROLLOUT_CORRECTION = {"level", "low", "high", "rejection"}
"""Settings that some losses take from algorithm.rolloutCorrection instead of policyLoss."""


@pytest.fixture(scope="module")
def algorithms() -> None:
    """Every module of the package is imported, so that everything is registered."""
    import rljob_trainer.algorithms as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


@pytest.mark.usefixtures("algorithms")
def test_estimators_take_what_the_table_says() -> None:
    from rljob_trainer.algorithms.estimators import advantage_estimators

    assert set(advantage_estimators) == set(ESTIMATORS)
    for name, entry in ESTIMATORS.items():
        registered = advantage_estimators[name]
        assert dict(registered.settings) == dict(entry.parameters), name
        assert registered.needs_critic == entry.needs_critic, name
        assert (registered.smallest_group >= 2) == entry.compares_samples, name


@pytest.mark.usefixtures("algorithms")
def test_policy_losses_take_what_the_table_says() -> None:
    from rljob_trainer.algorithms.policy_losses import policy_losses

    assert set(policy_losses) == set(POLICY_LOSSES)
    for name, entry in POLICY_LOSSES.items():
        settings = {k: v for k, v in policy_losses[name].settings.items() if k not in FROM_ROLLOUT_CORRECTION}
        assert settings == dict(entry.parameters), name


@pytest.mark.usefixtures("algorithms")
def test_kinds_of_kl_and_aggregation() -> None:
    from rljob_trainer.algorithms.aggregation import aggregations
    from rljob_trainer.algorithms.kl import kl_estimators

    assert set(aggregations) == set(get_args(AggregationType))
    assert set(kl_estimators) <= set(get_args(KlLossKind))
    assert set(get_args(KlRewardKind)) - {"full"} <= set(kl_estimators)


def test_generated_tasks() -> None:
    from rljob_trainer.data.tasks import TASKS

    assert set(TASKS) == set(get_args(TaskType))


def test_reward_functions() -> None:
    from rljob_trainer.rewards.rules import RULES, built_in

    built_in("gsm8k")
    assert set(RULES) | {"custom"} == set(get_args(RewardType))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_engine_args_are_those_of_the_installed_vllm() -> None:
    script = Path(__file__).parents[2] / "scripts" / "list_engine_args.py"
    spec = importlib.util.spec_from_file_location("list_engine_args", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.engine_arg_names()) == ENGINE_ARGS, f"run {script.name} and commit its output"
    assert set(SET_BY_RLJOB) <= ENGINE_ARGS
