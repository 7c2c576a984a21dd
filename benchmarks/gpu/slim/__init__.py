"""What the parts of gpu-check need beside a machine's own torch, small enough to be carried in a few archives."""
