"""Agents that know nothing of rljob: processes that talk to the endpoint. The page is docs/agents.md."""
