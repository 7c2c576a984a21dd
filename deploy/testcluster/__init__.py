"""A Kubernetes cluster for tests, of plain processes: where its programs come from, and how nodes are made of them.

Nothing here knows how rljob works; the one part that installs it is `addons`. docs/cluster.md tells how it is built.
"""
