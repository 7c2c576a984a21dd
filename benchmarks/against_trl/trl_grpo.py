"""TRL's GRPOTrainer on one setting; runs in the environment of the peer and writes its steps."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.against_trl.peer import StepStopwatch, main, questions
from benchmarks.against_trl.setting import PATTERN, Setting
from benchmarks.measuring import Step


def train(setting: Setting, model_folder: Path) -> list[Step]:
    """Trains ``setting.steps`` steps and gives what each of them took."""
    torch.manual_seed(setting.seed)
    tokens: list[int] = []

    def reward(completions: list[list[dict[str, str]]], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [float(bool(re.search(PATTERN, completion[0]["content"]))) for completion in completions]

    prompts = [{"prompt": [{"role": "user", "content": question}]} for question in questions(model_folder)]
    stopwatch = StepStopwatch()
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model_folder),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(prompts),
            args=GRPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                seed=setting.seed,
                per_device_train_batch_size=setting.sequences,
                num_generations=setting.samples_per_prompt,
                max_completion_length=setting.response_tokens,
                temperature=1.0,
                top_k=0,
                beta=0.0,
                learning_rate=setting.learning_rate,
                lr_scheduler_type="constant",
                max_steps=setting.steps,
                shuffle_dataset=False,
                gradient_checkpointing=False,
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
