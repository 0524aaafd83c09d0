"""How the nodes of a job find each other: `participant` decides, `store_rendezvous` performs."""
