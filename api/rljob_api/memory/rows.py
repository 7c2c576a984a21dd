"""The largest row that a rank of a job computes at once: what activations are counted for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LargestRow:
    """Siblings of one or more prompts as one packed row, each prompt in it once."""

    groups: int
    prompt: int
    """Tokens of each prompt."""
    samples: int
    """Over all groups."""
    response: int
    """Tokens of each response."""

    @property
    def tokens(self) -> int:
        """The number of tokens that the layers compute: nobody asks for what follows the last token of a response."""
        return self.groups * self.prompt + self.samples * (self.response - 1)

    @property
    def outputs(self) -> int:
        """Response tokens, for each of which there is a distribution."""
        return self.samples * self.response

    @property
    def last(self) -> int:
        """Tokens that the last layer computes beyond attention: those before a response token."""
        return self.groups + self.samples * (self.response - 1)

    @property
    def segments(self) -> int:
        """The sequences, each of them with what it adds to its prompt's first one; a single token adds nothing."""
        return self.samples if self.response > 1 else self.groups

    @property
    def keys(self) -> int:
        """Keys that attention reads: a shared prompt's are there for each sibling."""
        return self.segments * self.prompt + self.samples * (self.response - 1)

    @property
    def gathered(self) -> bool:
        """Whether keys are copied together, because siblings share a prompt."""
        return self.segments > self.groups


def largest_row(prompt: int, response: int, siblings: int, budget: int, share: int) -> LargestRow:
    """The largest row of a rank that has ``share`` sequences of a mini-batch, with prompts and responses of at most
    these lengths.

    Rows are filled up to the ``budget``; a sequence that is longer than that is a row of its own. Of rows as long, one
    of long responses is taken: with shorter ones there are more keys and fewer activations of the feed-forward part.
    """
    share = max(1, share)
    siblings = max(1, min(siblings, share))
    if prompt + response > budget:
        return LargestRow(1, prompt, 1, response)
    whole = -(-share // siblings) * prompt + share * response
    if whole <= budget:
        return LargestRow(-(-share // siblings), prompt, share, response)
    group = prompt + siblings * response
    groups = max(1, -(-budget // group))
    left = budget - groups * prompt
    if left < groups:  # a prompt more than whole sequences fill would leave no room for its response
        groups -= 1
        left = budget - groups * prompt
    samples = max(groups, -(-left // response))
    return LargestRow(groups, prompt, samples, left // samples)
