"""A real Kubernetes API server for tests: where its programs come from, and how it is started and stopped.

`programs` builds and caches the binaries, `control_plane` runs them. Nothing here knows rljob.
"""
