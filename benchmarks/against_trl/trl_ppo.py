"""TRL's PPOTrainer on one setting; runs in the environment of the peer and writes its steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer  # type: ignore[import-not-found]

from benchmarks.against_trl.model import prompt_ids
from benchmarks.against_trl.peer import StepStopwatch, main, questions
from benchmarks.against_trl.setting import KL_COEFFICIENT, LAMBDA, Setting
from benchmarks.measuring import Step


class FreeReward(torch.nn.Module):
    """A reward model that costs nothing: our side scores by a rule, so the peer is not charged for a forward pass.

    The score of a position is the parity of its token's id.
    """

    base_model_prefix = "backbone"

    def backbone(self, input_ids: torch.Tensor, **others: Any) -> SimpleNamespace:
        return SimpleNamespace(hidden_states=[(input_ids % 2).float().unsqueeze(-1)])

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def train(setting: Setting, model_folder: Path) -> list[Step]:
    """Trains ``setting.steps`` steps and gives what each of them took."""
    torch.manual_seed(setting.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    prompts = [{"input_ids": prompt_ids(tokenizer, question)} for question in questions(model_folder)]
    stopwatch = StepStopwatch()
    with tempfile.TemporaryDirectory() as output:
        trainer = PPOTrainer(
            args=PPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                seed=setting.seed,
                per_device_train_batch_size=setting.sequences,
                local_rollout_forward_batch_size=setting.sequences,
                total_episodes=setting.sequences * setting.steps,
                response_length=setting.response_tokens,
                temperature=1.0,
                num_ppo_epochs=setting.epochs,
                num_mini_batches=1,
                kl_coef=KL_COEFFICIENT,
                lam=LAMBDA,
                learning_rate=setting.learning_rate,
                lr_scheduler_type="constant",
                num_sample_generations=0,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            processing_class=tokenizer,
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            ref_model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            reward_model=FreeReward(),
            value_model=AutoModelForSequenceClassification.from_pretrained(
                model_folder, num_labels=1, dtype=torch.float32
            ),
            train_dataset=Dataset.from_list(prompts),
            callbacks=[stopwatch],
        )
        trainer.train()
    # This trainer runs every response to its full length, so every response counts as whole.
    tokens = [setting.sequences * setting.response_tokens] * setting.steps
    return stopwatch.steps(tokens, setting.epochs)


if __name__ == "__main__":
    main(train)
