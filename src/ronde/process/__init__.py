"""Processes of this machine: started, watched, ended as groups, and what they write and leave behind."""
