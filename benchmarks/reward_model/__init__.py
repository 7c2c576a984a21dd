"""What the pool of reward models costs around a model that is free. See the README."""
