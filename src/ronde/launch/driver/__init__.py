"""The driver of a job on several hosts, and the agents that it starts there."""
