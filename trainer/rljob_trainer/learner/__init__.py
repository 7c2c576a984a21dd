"""Actor, critic and reference on any number of ranks: packed forward passes, losses, optimizer steps, sharded state.

    protocol.py   what a learner is to those who use it; starting.py brings one up
    backend.py    what a backend is; backends/ has the built-in ones, and finds others by name
    group.py      the driver's handle of all ranks; actor.py: one rank's process, and its typed calls
    work.py       shares by placement and rules, and what ranks report; metrics.py puts reports together
    rank.py       one rank's models and what is done with them; gradients.py from a share to gradients
    passes.py     in which order the passes of a mini-batch run
    prefixes.py   what sequences begin with alike: the tree in which it is computed once
    packing.py    which data index trains what, in which micro-batches, and how one becomes a packed row
    attention.py, logprobs.py, models.py          the mathematics of a forward pass
    context.py, tensor.py, vocabulary.py          ranks that compute rows, layers and distributions together
    layout.py, residence.py                       a rank's part of a parameter, what rests in host memory
    anchor.py     the weights that a version of several pulls began with
    optim.py, adamw.py, muon.py, rates.py         clipping and refused steps, the rules, the learning rate
    state.py, export.py                           checkpoints that every layout reads, Hugging Face folders
    cpu/          speed on CPUs

Nothing here knows an algorithm: token streams and ``LossSettings`` come in (``protocol.py``). What lies beside
``backends/`` knows no backend.
"""
