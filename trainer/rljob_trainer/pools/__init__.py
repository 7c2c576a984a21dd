"""The engines of a run as one pool: which of them serve, what each has in hand, who joins, leaves, is lent or replaced.

pool.py           the pool: pauses, loans, replacements, activation of a version
dispatch.py       which request goes to which engine, and what becomes of those of a lost one
members.py        one engine as the pool sees it
lent.py           an engine that answers only its borrower
activity.py       which of them had nothing to do
engine_count.py   more or fewer of them while the run is under way
size.py           how many a job asks for, and how much each is given
"""
