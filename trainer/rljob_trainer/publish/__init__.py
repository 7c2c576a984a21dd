"""How the learner's weights become a version that every engine serves, and what is looked at before and after.

    publication.py    to engines that have weights of their own: who meets, sends and receives; failures get names
    quiet.py          lets running requests finish or pause first
    turns.py          on shared devices: whose memory is on them at each moment
    colocated.py      an engine in a rank's process, which samples from the rank's own weights
    same_weights.py   learner and engines compare what they hold
    canaries.py       learner and engines score the same sequences, and must agree

How bytes travel is the business of ``weights/``, which the processes of ranks and engines import without this room.
"""
