"""A job on several hosts, reached by ssh: one launcher, and an agent that it starts on each host."""
