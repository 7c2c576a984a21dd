"""How fast the operator is, on a real API server."""
