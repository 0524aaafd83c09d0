"""Connections between processes: addresses, authentication, the key of a job, and messages."""
