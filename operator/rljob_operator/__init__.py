"""The Kubernetes operator: RLJob in, KubeRay clusters and Ray jobs out.

`reconcile` decides and is pure; `executor` acts; kopf (`watching`) only says that something changed. What the job file
means comes from `rljob_api`; nothing here imports torch, ray or the trainer.
"""
