"""Actor, critic and reference on any number of ranks: packed forward passes, losses, optimizer steps, sharded state.

    group.py      the driver's handle (a ``Learner``): one Ray actor a rank
    work.py       what a rank is sent and what it reports; metrics.py puts reports together
    rank.py       one rank's models and what is done with them; gradients.py from a share to gradients
    packing.py    which rank trains what, in which micro-batches, and how one becomes a packed row
    attention.py, logprobs.py, models.py          the mathematics of a forward pass
    parallel.py, shards.py, residence.py          sharding, a rank's part of a tensor, what rests in host memory
    anchor.py     the weights that a version of several pulls began with
    optim.py, adamw.py, muon.py, rates.py         clipping and refused steps, the rules, the learning rate
    state.py, export.py                           checkpoints that reshard, Hugging Face folders

Nothing here knows an algorithm: token streams and ``LossSettings`` come in (``protocol.py``).
"""
