"""What a run writes down to be continued, and who may write.

place.py         where its state is kept: in its output folder, or in a bucket of which that is a working copy
output.py        the output folder: its lock, and what an earlier run left there
fence.py         which attempt is the newest, and the versions it has announced
ledger.py        what became of every prompt, in SQLite; ``account.py``: what its rows add up to
unfinished.py    the tokens of groups that a checkpoint finds begun
start_model.py   the model a run began with; ``same_job.py``, ``written_job.py``: its job
resuming.py      what a run starts from
"""
