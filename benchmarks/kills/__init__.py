"""Kills driver, learner rank, engine or all of them at random moments, and looks what became of every prompt."""
