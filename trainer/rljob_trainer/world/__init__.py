"""Everything outside the model that an environment calls: tools, services, time, randomness, ids (``protocol.py``)."""
