"""What makes one rank on CPUs fast, and nothing else: a backend may use it, the rest of the learner does not know it.

lanes.py          an update in two threads, and which micro-batches run in which
side_by_side.py   independent work at once on the cores of one process
plain_layer.py    the layers of Llama and its kin over packed rows in fewer passes over memory
"""
