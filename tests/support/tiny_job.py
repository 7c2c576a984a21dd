"""A job that is done in seconds."""

from __future__ import annotations

from typing import Any


def copy_job(**spec: Any) -> dict[str, Any]:
    """A tiny job: copy two digits. Keyword arguments replace whole sections of the spec."""
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {
                "random": {
                    "hiddenSize": 64,
                    "layers": 2,
                    "heads": 2,
                    "contextLength": 16,
                    "tokenizer": {"characters": "0123456789="},
                }
            },
            "data": {
                "train": {"task": {"type": "copy", "digits": 2, "size": 80}},
                "validation": [{"name": "held-out", "task": {"type": "copy", "digits": 2, "size": 8}}],
                "prompt": "question",
                "answer": "answer",
                "maxPromptTokens": 6,
            },
            "reward": {"functions": [{"type": "exactMatch", "params": {"partial": True}}]},
            "algorithm": {"preset": "grpo", "kl": {"inLoss": {"coefficient": 0}}, "entropyCoefficient": 0.01},
            "batch": {"groups": 8, "samplesPerPrompt": 4, "miniBatchGroups": 4},
            "rollout": {"engine": "torch", "maxResponseTokens": 3},
            "trainer": {"optimizer": {"learningRate": 1e-3}},
            "checkpoint": {"everySteps": 2},
            "logging": {"tensorboard": False},
            "stop": {"steps": 6},
            **spec,
        },
    }
