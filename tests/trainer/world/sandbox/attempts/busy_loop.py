"""Compute for long."""

while True:
    pass
