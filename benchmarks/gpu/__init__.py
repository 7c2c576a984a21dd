"""What only a GPU can say, part by part: `make gpu-check`, and `make gpu-accept`."""
