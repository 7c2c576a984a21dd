"""How fast a step was: stages, tokens per second, shares of the devices' peak, waiting, and the driver's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

from rljob_trainer.episodes.episode import Group
from rljob_trainer.learner.protocol import LearnerFacts, NetworkSize
from rljob_trainer.telemetry.catalogue import NESTED_STAGES
from rljob_trainer.telemetry.speed import (
    ModelSize,
    forward_flops,
    peak_flops,
    throughput_metrics,
    timing_metrics,
    utilisation_metrics,
)
from rljob_trainer.telemetry.timing import StageTimes

_WAITING = ("generate", "reward", "idle")
"""Stages in which the learner has nothing to do."""


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """Measures the steps of one run; every call takes the lap of ``times``."""

    times: StageTimes
    devices: int
    """Of all pools together, for rates per device."""
    trainer_devices: int
    epochs: int
    learner: LearnerFacts | None = None
    """None: no share of the peak is told."""

    def of(self, groups: Sequence[Group], learner: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Metrics of a step of ``seconds`` that trained ``groups``; ``learner`` holds the learner's own timings."""
        lengths = [length for group in groups for length in sequence_lengths(group)]
        response = sum(group.response_tokens for group in groups)
        lap = self.times.lap() | {"step": seconds}
        for stage in NESTED_STAGES:
            if (measured := learner.get(f"timing/{stage}_seconds")) is not None:
                lap[stage] = measured
        trained = max(1e-9, seconds - lap.get("validation", 0.0) - lap.get("checkpoint", 0.0))
        metrics = timing_metrics(lap, all_tokens=sum(lengths), response_tokens=response)
        metrics |= throughput_metrics(
            step_seconds=trained,
            prompt_tokens=sum(lengths) - response,
            response_tokens=response,
            samples=len(lengths),
            devices=self.devices,
        )
        metrics["pipeline/learner_idle_ratio"] = min(1.0, sum(lap.get(stage, 0.0) for stage in _WAITING) / trained)
        metrics["memory/host_gigabytes/driver"] = psutil.Process().memory_info().rss / 1e9
        return metrics | self._utilisation(lengths, lap)

    def _utilisation(self, lengths: Sequence[int], lap: Mapping[str, float]) -> dict[str, float]:
        facts = self.learner
        peak = None if facts is None else peak_flops(facts.device)
        if facts is None or peak is None:
            return {}
        return utilisation_metrics(
            forward=_forward(facts.actor, lengths),
            critic_forward=0.0 if facts.critic is None else _forward(facts.critic, lengths),
            peak_flops=peak,
            devices=self.trainer_devices,
            epochs=self.epochs,
            actor_update_seconds=lap.get("update_actor", 0.0),
            critic_update_seconds=lap.get("update_critic", 0.0),
            inference_seconds=lap.get("old_log_probs", 0.0),
        )


def _forward(size: NetworkSize, lengths: Sequence[int]) -> float:
    return forward_flops(ModelSize(size.parameters, size.layers, size.width), lengths)


def sequence_lengths(group: Group) -> list[int]:
    """Prompt and response tokens of each sequence that is trained."""
    return [len(leaf.prompt_ids) + len(leaf.tokens) for leaf in group.leaves]
