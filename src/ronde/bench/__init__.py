"""The ranks of `ronde bench`: they measure, and rank 0 prints."""
