"""Where ranks meet before they are connected: one interface (`base.Store`), several stores."""
