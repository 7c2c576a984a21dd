"""What a sample of a prompt comes to: episodes, the programs that play them, and the record of what they did.

What a program of the user's own is written with can be imported from here.
"""

from rljob_trainer.episodes.curfew import EpisodeOverError
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.play import Answer, Voice
from rljob_trainer.world.protocol import World, WorldError

__all__ = ["Answer", "EpisodeOverError", "Task", "Voice", "World", "WorldError"]
