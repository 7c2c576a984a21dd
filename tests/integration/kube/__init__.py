"""A real Kubernetes API server for tests: how it is started and stopped. Nothing here knows rljob.

Where its programs come from is the business of `testcluster.programs` in `deploy/`.
"""
