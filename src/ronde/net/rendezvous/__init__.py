"""How nodes meet and agree on the members of a round: one interface (`base.Rendezvous`), several backends by name."""
