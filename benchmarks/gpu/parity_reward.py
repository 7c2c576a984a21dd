"""The reward of the steps that a GPU is measured with."""


def parity(response: str) -> float:
    """1 for a response of an odd number of characters: random weights earn it half of the time, where no answer of
    theirs is ever right, and without differences among the responses to a prompt an update would move no weight."""
    return float(len(response) % 2)
