"""The simulator against published tables, and how fast it is."""
