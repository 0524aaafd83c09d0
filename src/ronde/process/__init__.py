"""Processes of this machine: how they start, end and are watched as groups, and their output and error files."""
