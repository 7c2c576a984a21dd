"""The RLJob v1alpha1 as pydantic models, one file a topic; ``job.RLJob`` is the root."""
