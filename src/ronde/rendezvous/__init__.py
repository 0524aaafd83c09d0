"""How the nodes of a job find each other: `participant` decides, `over_store` performs."""
