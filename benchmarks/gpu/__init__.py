"""On one GPU with a model of 0.5 billion parameters: engine, learner and step, each against its mark."""
