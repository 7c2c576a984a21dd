"""What a model is told that searches."""

from __future__ import annotations

from rljob_trainer.environments.search.corpus import Corpus, Passage
from rljob_trainer.environments.search.index import PassageIndex
from rljob_trainer.environments.tools import ToolError

NOTHING = "No passage has any of these words."


class PassageSearch:
    """Looks for passages of one corpus. A call computes for some milliseconds, and is made in a thread."""

    def __init__(self, corpus: Corpus, index: PassageIndex, digest: str, passages: int, longest: int | None) -> None:
        """``digest``: of the corpus. ``passages``: that a call returns; ``longest``: characters of a text; None: as it
        is."""
        self.digest = digest
        self._corpus = corpus
        self._index = index
        self._passages = passages
        self._longest = longest

    def search(self, query: str) -> str:
        """Searches a collection of texts and returns the passages that fit the words of the query best."""
        if not query.strip():
            raise ToolError("the query is empty; write the words to look for")
        found = [self._corpus[index] for index in self._index.best(query, self._passages)]
        if not found:
            return NOTHING
        return "\n".join(self._shown(number, passage) for number, passage in enumerate(found, 1))

    def _shown(self, number: int, passage: Passage) -> str:
        """The passage as Search-R1 shows it (arXiv 2503.09516; ``_passages2string`` of its repository)."""
        text = passage.text
        if self._longest is not None and len(text) > self._longest:
            text = f"{text[: self._longest].rstrip()} ..."
        return f"Doc {number}(Title: {passage.title}) {text}" if passage.title else f"Doc {number}: {text}"
