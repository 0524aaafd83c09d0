"""A job on Kubernetes: its objects, its Pods, and how it ends."""
