"""Stand-ins for what a test machine doesn't have: KubeRay with a kubelet, Ray's dashboard, the driver, a bad network.

They know Kubernetes, Ray and the driver's contract (`rljob_api.status`), and nothing of the operator.
"""
