"""What overlap gains with real processes, and what the pipeline itself costs."""
