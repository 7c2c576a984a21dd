"""The tool ``search``: passages of a corpus, found by their words. docs/search.md.

- ``corpus.py``: the passages of a source, looked at one by one when a run begins, and a digest of them all.
- ``index.py``: how words are told apart, BM25 (the package bm25s, https://github.com/xhluca/bm25s, MIT), and the order.
- ``kept.py``: indexes on the disk, by what they were made of, so that one is made once.
- ``tool.py``: what the model is told.
"""
