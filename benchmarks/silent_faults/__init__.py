"""Faults that are put into a running job beneath its guards: which are named, by what sentence, after how many steps."""
