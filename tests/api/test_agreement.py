"""The API's tables and the code that they describe must agree."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest

from rljob_api.engine_args import ENGINE_ARGS, SET_BY_RLJOB
from rljob_api.methods import ESTIMATOR_PARAMETERS, POLICY_LOSS_PARAMETERS
from rljob_api.spec.algorithm import Advantage, AggregationType, KlLossKind, KlRewardKind, PolicyLossSpec
from rljob_api.spec.data import TaskType
from rljob_api.spec.reward import RewardType


def script(name: str) -> Any:
    """A module of the folder `scripts`."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def algorithms() -> None:
    """Every module of the package is imported, so that everything is registered."""
    import rljob_trainer.algorithms as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def test_the_tables_of_methods_are_what_the_decorators_say() -> None:
    tables = script("method_tables")
    assert tables.PATH.read_text() == tables.page(), "type `make generate`"


def test_every_parameter_of_a_method_has_its_field_in_a_job() -> None:
    assert set(Advantage.model_fields) >= ESTIMATOR_PARAMETERS
    assert set(PolicyLossSpec.model_fields) >= POLICY_LOSS_PARAMETERS


@pytest.mark.usefixtures("algorithms")
def test_kinds_of_kl_and_aggregation() -> None:
    from rljob_trainer.algorithms.aggregation import aggregations
    from rljob_trainer.algorithms.kl import kl_estimators

    assert set(aggregations) == set(get_args(AggregationType))
    assert set(kl_estimators) <= set(get_args(KlLossKind))
    assert set(get_args(KlRewardKind)) - {"full"} <= set(kl_estimators)


def test_generated_tasks() -> None:
    from rljob_trainer.data.tasks import TASKS

    assert {*TASKS, "reasoningGym"} == set(get_args(TaskType))  # whose problems another program makes


def test_reward_functions() -> None:
    from rljob_trainer.rewards.rules import RULES, built_in

    built_in("gsm8k")
    assert set(RULES) | {"custom", "judge", "rewardModel"} == set(get_args(RewardType))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_engine_args_are_those_of_the_installed_vllm() -> None:
    names = set(script("list_engine_args").engine_arg_names())
    assert names == ENGINE_ARGS, "run scripts/list_engine_args.py and commit its output"
    assert set(SET_BY_RLJOB) <= ENGINE_ARGS
