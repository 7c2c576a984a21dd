"""Methods by name: what they need is known, and misuse is named."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from ragged import make_batch

from rljob_api.methods import POLICY_LOSSES
from rljob_trainer.algorithms import (
    AdvantageInputs,
    advantage_estimators,
    advantages,
    aggregations,
    kl_estimators,
    policy_losses,
)
from rljob_trainer.algorithms.registry import Method, Registry


def test_what_a_policy_loss_needs_is_what_the_api_refuses_it_without() -> None:
    """Names, parameters and defaults are compared in tests/api."""
    for name, method in POLICY_LOSSES.items():
        assert policy_losses[name].needs_rollout_log_probs == method.needs_bypass
        assert method.aggregation in (None, policy_losses[name].aggregation)


def test_selectors_take_the_settings_of_their_loss() -> None:
    for name in ("clipCov", "klCov"):
        selector = policy_losses[name].selector
        assert selector is not None
        parameters = inspect.signature(selector).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        assert own == dict(policy_losses[name].settings)


def test_each_method_has_a_line_of_documentation_with_its_source() -> None:
    for registry in (advantage_estimators, policy_losses, aggregations, kl_estimators):
        for method in registry.values():
            assert inspect.getdoc(method.function), method.name


def test_unknown_names_and_settings_list_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no advantage estimator 'grp0'.*grpo, grpo_passk"):
        advantage_estimators["grp0"]
    with pytest.raises(ValueError, match=r"ppoClip has no setting 'clip'.*clip_low, clip_high, dual_clip"):
        policy_losses["ppoClip"].bind({"clip": 0.2})
    with pytest.raises(ValueError, match=r"rloo has no setting 'gamma'; its settings are: none"):
        advantage_estimators["rloo"].bind({"gamma": 1.0})
    assert advantage_estimators["gae"].bind({"lambda": 0.9}) == {"lambda_": 0.9}
    registry: Registry[Method[int]] = Registry("number")
    registry.add(Method("one", lambda: 1))
    with pytest.raises(ValueError, match="two definitions of the number 'one'"):
        registry.add(Method("one", lambda: 1))
    assert "one" in registry
    assert "two" not in registry


@pytest.mark.parametrize(
    ("estimator", "missing"),
    [("gae", "values"), ("grpo", "groups"), ("remax", "greedy_scores"), ("gdpo", "parts")],
)
def test_what_an_estimator_lacks_is_named(estimator: str, missing: str) -> None:
    batch = make_batch([2], [3, 4], 0.0, seed=1)
    groups = None if missing == "groups" else torch.tensor(batch.groups)
    inputs = AdvantageInputs(batch.mask, batch.segments, scores=batch.vector("scores", torch.float32), groups=groups)
    with pytest.raises(ValueError, match=f"{estimator} needs `{missing}`"):
        advantages(estimator, inputs)
    with pytest.raises(ValueError, match="neither"):
        advantages("reinforce", AdvantageInputs(batch.mask, batch.segments))
    with pytest.raises(ValueError, match="pass `truncated` too"):
        advantages("reinforce", AdvantageInputs(batch.mask, batch.segments, inputs.scores, final_values=torch.zeros(2)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_named_by_its_sample(value: float) -> None:
    batch = make_batch([12], [1] * 12, 0.0, seed=1)
    scores = batch.vector("scores", torch.float32)
    scores[2:12] = value
    inputs = AdvantageInputs(batch.mask, batch.segments, scores=scores, groups=torch.tensor(batch.groups))
    with pytest.raises(ValueError, match=rf"sample 2 of this batch: {value} .*2, 3, 4, 5, 6, 7, 8, 9 and 2 more"):
        advantages("grpo", inputs)
    parts = torch.zeros(12, 2)
    parts[7, 1] = value
    fine = AdvantageInputs(batch.mask, batch.segments, torch.zeros(12), groups=inputs.groups, parts=parts)
    with pytest.raises(ValueError, match="parts of sample 7"):
        advantages("gdpo", fine)


def test_a_value_that_is_no_number_is_named_by_its_sample() -> None:
    batch = make_batch([3], [2, 3, 1], 0.3, seed=2)
    batch.rows["values"][1] = [math.inf] * 3
    inputs = AdvantageInputs(
        batch.mask,
        batch.segments,
        scores=batch.vector("scores", torch.float32),
        values=batch.stream("values", torch.float32),
    )
    with pytest.raises(ValueError, match="critic of sample 1 "):
        advantages("gae", inputs)


def test_maxrl_refuses_a_penalty_below_0_naming_the_sample() -> None:
    batch = make_batch([2], [3, 4], 0.0, seed=1)
    inputs = AdvantageInputs(
        batch.mask, batch.segments, scores=torch.tensor([1.0, -0.5]), groups=torch.tensor(batch.groups)
    )
    with pytest.raises(ValueError, match=r"sample 1 of this batch has -0\.5"):
        advantages("maxrl", inputs)
