"""The algorithm core against verl's own functions: time, memory, agreement, and the memory's bandwidth as the limit."""
