"""rljob against TRL on a CPU: the same tiny model, prompts, lengths and batches; README.md says how it is made fair."""
