"""How nodes find each other and agree who takes part: one interface (`base.Rendezvous`), several ways, by name."""
