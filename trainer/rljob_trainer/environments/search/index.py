"""BM25 over the words of passages, by the package bm25s, whose index is arrays of numpy."""

from __future__ import annotations

import logging
import sys
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import regex

from rljob_trainer.errors import DataError

if TYPE_CHECKING:
    from rljob_api.spec.environment import CorpusSpec

_WITHOUT_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}"
_WORD = regex.compile(rf"[{_WITHOUT_SPACES}]|[[\w\p{{M}}]--[{_WITHOUT_SPACES}]]+", regex.V1)
"""Letters, digits and their marks. Scripts that put no spaces between words are taken character by character."""
_MOST_WORDS = 256
"""Of one query; what stands behind them is not looked at."""


def words(text: str) -> list[str]:
    """The words of a text in one form: composed (NFKC), without capitals."""
    found: list[str] = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return found


def package() -> Any:
    """bm25s, without Numba, which it would import where it is installed and which nothing here uses: a second and 100
    MB, and vLLM for CPUs (0.32) starts no engine in a process that has Numba's llvmlite already."""
    with _without("numba"):
        import bm25s

    # It sets the level of its logger to DEBUG, and would tell every root handler of each index.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


@contextmanager
def _without(module: str) -> Iterator[None]:
    """Imports of ``module`` fail in this thread, unless it is there already."""
    finder = _NotFound(module, threading.get_ident())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@dataclass(frozen=True, slots=True, eq=False)
class _NotFound(MetaPathFinder):
    module: str
    thread: int

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == self.module and threading.get_ident() == self.thread:
            raise ModuleNotFoundError(f"{fullname} is not wanted here", name=fullname)


class WordIds:
    """Words as numbers, in the order in which they came first."""

    def __init__(self, stopwords: str | None) -> None:
        """``stopwords``: the language whose commonest words are left out; None: none are."""
        self.known: dict[str, int] = {}
        self._left_out: frozenset[str] = frozenset()
        if stopwords is not None:
            name = "EN" if stopwords == "english" else stopwords.upper()
            self._left_out = frozenset(map(str.casefold, getattr(package().stopwords, f"STOPWORDS_{name}")))

    def of(self, text: str) -> list[int]:
        """The numbers of a text's words; new ones get one."""
        known = self.known
        return [known.setdefault(word, len(known)) for word in words(text) if word not in self._left_out]


class PassageIndex:
    """Finds passages by their numbers, which are their places in the corpus."""

    def __init__(self, scorer: Any) -> None:
        """``scorer``: a ``bm25s.BM25`` that has an index."""
        self._scorer = scorer

    @classmethod
    def of(cls, texts: Iterable[list[int]], ids: WordIds, given: CorpusSpec) -> PassageIndex:
        """The index of passages whose words have the numbers ``texts``, by ``ids``. Takes a minute for some hundred
        thousand. Raises ``DataError`` if no passage has a word."""
        passages = list(texts)
        if not ids.known:
            raise DataError(f"{given.source}: no passage has a searchable word; check the column {given.text!r}")
        scorer = package().BM25(method="lucene", k1=given.k1, b=given.b)
        scorer.index((passages, ids.known), create_empty_token=False, show_progress=False)
        return cls(scorer)

    @classmethod
    def load(cls, folder: Path) -> PassageIndex:
        """What ``save`` wrote; raises whatever a damaged one makes bm25s and numpy raise."""
        return cls(package().BM25.load(folder, show_progress=False))

    def save(self, folder: Path) -> None:
        """Writes the index into a new folder. Raises ``OSError``."""
        self._scorer.save(folder, show_progress=False)

    def __len__(self) -> int:
        return int(self._scorer.scores["num_docs"])

    def scores(self, query: str) -> np.ndarray:
        """``[passages]``, float32; 0 for those that have no word of the query."""
        known = self._scorer.vocab_dict
        # Stopwords were never given a number.
        ids = [known[word] for word in words(query)[:_MOST_WORDS] if word in known]
        found: np.ndarray = self._scorer.get_scores_from_ids(ids)
        return found

    def best(self, query: str, most: int) -> list[int]:
        """The passages with the highest scores above 0, ``most`` at most, the best first; of equal ones that which
        stands first in the corpus."""
        scores = self.scores(query)
        found = np.flatnonzero(scores > 0)
        if len(found) > most:
            least = np.partition(scores[found], len(found) - most)[len(found) - most]
            found = found[scores[found] >= least]
        order = np.lexsort((found, -scores[found]))[:most]
        return [int(index) for index in found[order]]
