"""Writes api/rljob_api/methods.py, what the API knows of every method, from the decorators in rljob_trainer.algorithms
and of the built-in reward functions in rljob_trainer.rewards.

python scripts/method_tables.py
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

PATH = Path(__file__).parents[1] / "api" / "rljob_api" / "methods.py"
_FROM_ROLLOUT_CORRECTION = {"level", "low", "high", "normalize", "clamp", "rejection"}
"""Settings that some losses take from algorithm.rolloutCorrection instead of policyLoss."""

_HEAD = '''"""Every method by name: its parameters with their defaults, and what it needs. Written by `make generate`.

The functions are in ``rljob_trainer.algorithms`` and ``rljob_trainer.rewards``, and so is what stands here: in their
decorators and keyword-only parameters. Validation must not import torch, hence this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rljob_api.method import EstimatorMethod, ParameterKind, PolicyLossMethod

'''
_FOOT = """
ESTIMATOR_PARAMETERS = frozenset(name for method in ESTIMATORS.values() for name in method.parameters)
POLICY_LOSS_PARAMETERS = frozenset(name for method in POLICY_LOSSES.values() for name in method.parameters)
"""


def page() -> str:
    """The whole module.

    Raises:
        ValueError: a setting has no default, which every job without one would need.
    """
    import rljob_trainer.algorithms as package

    # A method is registered when its module is imported.
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    from rljob_trainer.algorithms.estimators import advantage_estimators
    from rljob_trainer.algorithms.policy_losses import policy_losses

    estimators = {
        method.name: {
            **_parameters(method.name, method.settings),
            **({"compares_samples": True} if method.needs_groups else {}),
            **({"needs_critic": True} if method.needs_critic else {}),
        }
        for method in advantage_estimators.values()
    }
    losses = {
        method.name: {
            **_parameters(method.name, method.settings),
            **({"aggregation": method.aggregation} if method.aggregation else {}),
            **({"needs_bypass": True} if method.needs_rollout_log_probs else {}),
        }
        for method in policy_losses.values()
    }
    return (
        _HEAD
        + _literal("Estimator", estimators)
        + _literal("PolicyLossType", losses)
        + "\n"
        + _table("ESTIMATORS", "Estimator", "EstimatorMethod", estimators)
        + "\n"
        + _table("POLICY_LOSSES", "PolicyLossType", "PolicyLossMethod", losses)
        + _FOOT
        + _rewards()
    )


def _rewards() -> str:
    """What ``params`` of each built-in reward function may hold. The pattern of ``pattern`` is a field of its own."""
    from rljob_trainer.rewards.parameters import keyword_parameters
    from rljob_trainer.rewards.rules import RULES, built_in

    built_in("")  # imports them all
    kinds = {bool: "boolean", int: "integer", float: "number", str: "text", dict[str, Any]: "object"}
    lines = ["REWARD_PARAMETERS: Mapping[str, Mapping[str, ParameterKind]] = {"]
    for name, rule in sorted(RULES.items()):
        types = get_type_hints(rule.function)
        parameters = {key: types[found.name] for key, found in keyword_parameters(rule.function).items()}
        parameters.pop("pattern", None)
        if not parameters:
            lines.append(f"    {_quoted(name)}: {{}},")
            continue
        lines.append(f"    {_quoted(name)}: {{")
        for key, annotation in parameters.items():
            given = get_args(annotation) if get_origin(annotation) is Literal else ()
            choices = ", ".join(map(_quoted, given))
            lines.append(f"        {_quoted(key)}: {f'({choices})' if choices else _quoted(kinds[annotation])},")
        lines.append("    },")
    return "\n".join(
        [*lines, "}", '"""By the type of a function, as its ``params`` are named in a job; ``custom`` is free."""', ""]
    )


def _parameters(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {name: value for name, value in settings.items() if name not in _FROM_ROLLOUT_CORRECTION}
    for name, value in parameters.items():
        if not isinstance(value, float | int | bool | None):
            raise ValueError(f"{method}: the setting {name} needs a default that is a number, a boolean or None")
    return {"parameters": parameters} if parameters else {}


def _literal(name: str, values: Iterable[str]) -> str:
    return f"{name} = Literal[\n" + "".join(f"    {_quoted(value)},\n" for value in values) + "]\n"


def _table(name: str, key: str, kind: str, methods: Mapping[str, Mapping[str, Any]]) -> str:
    """As ruff formats it: a comma behind the last argument keeps each on a line of its own."""
    lines = [f"{name}: Mapping[{key}, {kind}] = {{"]
    for method, facts in methods.items():
        if not facts:
            lines.append(f"    {_quoted(method)}: {kind}(),")
            continue
        lines.append(f"    {_quoted(method)}: {kind}(")
        for fact, value in facts.items():
            if isinstance(value, dict):
                lines += [
                    f"        {fact}={{",
                    *(f"            {_quoted(k)}: {v!r}," for k, v in value.items()),
                    "        },",
                ]
            else:
                lines.append(f"        {fact}={_quoted(value) if isinstance(value, str) else value},")
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    return f'"{text}"'


if __name__ == "__main__":
    PATH.write_text(page())
