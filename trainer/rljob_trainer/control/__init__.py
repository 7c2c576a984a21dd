"""How a run is watched and steered from outside, and when it is over.

http.py              status and metrics for whoever may know, commands for whoever has the token
standing.py          where the run stands: what all of these are told
steering.py          what the operator wants of a running driver
signals.py           signals and the operator's suspend as a wish to stop
stop_conditions.py   when a run has done what its job asks for
mismatch_limits.py   what a run does when engines and trainer disagree
controls.py          all of them together, for the run
"""
