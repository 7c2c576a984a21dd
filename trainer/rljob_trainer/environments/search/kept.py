"""Indexes on the disk, each under what it was made of: passages, settings, and the versions that made it.

They lie in ``$XDG_CACHE_HOME/rljob/search`` (``~/.cache`` where that is not set), for all runs of a user. An index is a
folder that is written under another name and gets its own by one rename. ``manifest.json`` says what it is made of, and
size and digest of each file: what is not so is not used, said, and made anew. A cache that can't be written costs time
and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import unicodedata
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import regex

from rljob_trainer.environments.search.corpus import Corpus
from rljob_trainer.environments.search.index import PassageIndex, WordIds, package
from rljob_trainer.environments.search.tool import PassageSearch
from rljob_trainer.errors import DataError
from rljob_trainer.world.protocol import WorldError

if TYPE_CHECKING:
    from rljob_api.spec.environment import CorpusSpec

FORMAT = 1
"""Another one where words are told apart otherwise, or files lie otherwise."""
MANIFEST = "manifest.json"
_CHUNK = 1 << 22
_LOOK_EVERY = 4096
"""Passages between two looks at the clock."""
SAY_SECONDS = 10.0
"""Between two lines about work that takes long."""


def kept_folder() -> Path:
    """Where indexes lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rljob" / "search"


def opened_search(
    given: CorpusSpec, field: str, base: Path, report: Callable[[str], None], folder: Path | None = None
) -> PassageSearch:
    """The search that a job names at ``field``, its index loaded or made. May take long, and then ``report`` is told
    how far it is. ``folder``: where indexes are kept; None: ``kept_folder()``.

    Raises ``DataError`` and ``JobFileError`` for a corpus that isn't one.
    """
    corpus = Corpus(given, field, base)
    digest = corpus.sealed(_Progress(len(corpus), f"{field}.source: reading", report).one_more)
    made_of = {
        "format": FORMAT,
        "bm25s": package().__version__,
        # Which tell words apart, and add up.
        "tables": [unicodedata.unidata_version, regex.__version__, np.__version__.split(".")[0]],
        "passages": digest,
        "stopwords": given.stopwords,
        "k1": given.k1,
        "b": given.b,
    }
    key = hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=16).hexdigest()
    place = (folder or kept_folder()) / key
    index = _loaded(place, made_of, len(corpus), report)
    if index is None:
        try:
            index = _made(corpus, given, field, report)
        except WorldError as changed:  # which is what it is to an episode
            raise DataError(str(changed)) from changed
        _keep(index, place, made_of, report)
    return PassageSearch(corpus, index, digest, given.passages, given.passage_characters)


def _made(corpus: Corpus, given: CorpusSpec, field: str, report: Callable[[str], None]) -> PassageIndex:
    began = time.monotonic()
    ids, progress = WordIds(given.stopwords), _Progress(len(corpus), f"{field}: indexing", report)
    texts = []
    for passage in corpus:
        texts.append(ids.of(passage.whole))
        progress.one_more()
    if progress.said:
        report(f"{field}: ranking {len(corpus):,} passages with {len(ids.known):,} different words")
    index = PassageIndex.of(texts, ids, given)
    report(f"{field}: indexed {len(corpus):,} passages in {time.monotonic() - began:.1f} s")
    return index


def _loaded(
    place: Path, made_of: Mapping[str, Any], passages: int, report: Callable[[str], None]
) -> PassageIndex | None:
    """The index that is kept at ``place``; None: there is none, or none that is whole."""
    try:
        manifest = json.loads((place / MANIFEST).read_bytes())
        if manifest["made_of"] != made_of:
            raise ValueError("it was built from something else")
        for name, said in manifest["files"].items():
            if _seal(place / name) != said:
                raise ValueError(f"{name} has changed since it was written")
        index = PassageIndex.load(place)
        if len(index) != passages:
            raise ValueError(f"it has {len(index)} passages")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as problem:
        if not isinstance(problem, FileNotFoundError) or os.path.lexists(place):
            report(f"the index in {place} cannot be used ({problem or type(problem).__name__}) and is rebuilt")
        return None
    return index


def _keep(index: PassageIndex, place: Path, made_of: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Writes the index to ``place``. What cannot be written is said."""
    writing = place.with_name(f".writing-{place.name}-{uuid.uuid4().hex[:8]}")
    try:
        writing.mkdir(parents=True)
        index.save(writing)
        files = {file.name: _seal(file) for file in sorted(writing.iterdir())}
        (writing / MANIFEST).write_text(json.dumps({"made_of": made_of, "files": files}))
        for file in writing.iterdir():
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
        # Another run may have been faster to write it; what is there otherwise is damaged.
        if _loaded(place, made_of, len(index), lambda _: None) is None:
            with suppress(FileNotFoundError):
                place.rename(old := writing.with_name(f"{writing.name}-old"))
                shutil.rmtree(old, ignore_errors=True)
            writing.rename(place)
    except OSError as problem:
        if _loaded(place, made_of, len(index), lambda _: None) is None:
            report(f"cannot keep the index in {place.parent} ({problem.strerror or problem}); each run rebuilds it")
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _seal(file: Path) -> list[object]:
    """Size and digest of a file. Raises ``OSError``."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return [file.stat().st_size, digest.hexdigest()]


class _Progress:
    """Says how far a pass over all passages is, if it takes longer than ``SAY_SECONDS``."""

    def __init__(self, total: int, doing: str, report: Callable[[str], None]) -> None:
        self.said = False
        self._total, self._doing, self._report = total, doing, report
        self._done = 0
        self._next = time.monotonic() + SAY_SECONDS

    def one_more(self) -> None:
        """Another passage is done."""
        self._done += 1
        if self._done % _LOOK_EVERY == 0 and (now := time.monotonic()) >= self._next:
            self.said, self._next = True, now + SAY_SECONDS
            self._report(f"{self._doing} {self._total:,} passages, {100 * self._done // self._total} % done")
