"""A real small language model learns a format by GRPO: SmolLM2-135M-Instruct on GSM8K prompts."""
