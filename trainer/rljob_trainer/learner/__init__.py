"""Actor, critic and reference on any number of ranks: packed forward passes, losses, optimizer steps, sharded state.

    group.py      the driver's handle (a ``Learner``): one Ray actor a rank
    work.py       what a rank is sent and what it reports; metrics.py puts reports together
    rank.py       one rank's models and what is done with them; gradients.py from a share to gradients
    packing.py    which rank trains what, in which micro-batches, and how one becomes a packed row
    attention.py, logprobs.py, models.py          the mathematics of a forward pass
    parallel.py, optim.py, residence.py           sharding, AdamW on shards, what rests in host memory
    state.py, export.py                           checkpoints that reshard, Hugging Face folders

Nothing here knows an algorithm: token streams and ``LossSettings`` come in (``protocol.py``).
"""
