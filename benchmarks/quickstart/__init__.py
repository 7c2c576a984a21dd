"""The quick start over five seeds: how long it takes and what it reaches."""
