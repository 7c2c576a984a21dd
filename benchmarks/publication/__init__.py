"""Publishing weights against a raw broadcast of the same bytes."""
