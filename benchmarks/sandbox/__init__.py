"""How fast programs run in the sandbox."""
