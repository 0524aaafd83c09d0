"""Processes of this machine: how they start and end as groups, and the errors and signals that end them."""
