"""Log-probs, entropy and their gradients from hidden states in chunks, against the plain way: time and memory."""
