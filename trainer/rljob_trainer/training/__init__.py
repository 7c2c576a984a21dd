"""One training step: from scored groups to updated weights. Algorithms say what, the learner does it."""
