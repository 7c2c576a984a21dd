"""TRL's GRPOTrainer with vLLM on the same GPU ("colocate"); runs in the peer's environment, writes its steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.against_trl.peer import StepStopwatch, main, questions
from benchmarks.against_trl.setting import Setting
from benchmarks.measuring import Step

SEQUENCES_AT_ONCE = 32
"""Sequences of one forward and backward pass; the rest of the batch is accumulated."""


def train(setting: Setting, model_folder: Path) -> list[Step]:
    """Trains ``setting.steps`` steps and gives what each of them took."""
    tokens: list[int] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [float(sum(ids) % 2) for ids in completion_ids]

    prompts = [{"prompt": [{"role": "user", "content": question}]} for question in questions(model_folder)]
    stopwatch = StepStopwatch()
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16),
            processing_class=AutoTokenizer.from_pretrained(model_folder),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(prompts),
            args=GRPOConfig(
                output_dir=output,
                bf16=True,
                seed=setting.seed,
                per_device_train_batch_size=SEQUENCES_AT_ONCE,
                gradient_accumulation_steps=setting.sequences // SEQUENCES_AT_ONCE,
                num_generations=setting.samples_per_prompt,
                max_completion_length=setting.response_tokens,
                temperature=1.0,
                beta=0.0,
                learning_rate=setting.learning_rate,
                lr_scheduler_type="constant",
                max_steps=setting.steps,
                shuffle_dataset=False,
                gradient_checkpointing=False,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=0.4,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            callbacks=[stopwatch],
        )
        trainer.train()
    return stopwatch.steps(tokens, setting.epochs)


if __name__ == "__main__":
    main(train)
