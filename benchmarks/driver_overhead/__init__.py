"""What a step costs when the model costs nothing."""
