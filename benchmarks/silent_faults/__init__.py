"""Faults that are put into a running job beneath its guards: which are named, in which words, how soon."""
