"""What a trainer rank holds on its GPU at its peak, by part, computed without a GPU."""
