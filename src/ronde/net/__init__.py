"""Connections, authentication, addresses, stores, and the shell of the rendezvous."""
