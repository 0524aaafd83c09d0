"""How workers are started: the plan, and the shells that perform it."""
