"""An OpenAI-compatible HTTP endpoint in front of an episode's model, for agents that know nothing of rljob.

The page is docs/agents.md.
"""
