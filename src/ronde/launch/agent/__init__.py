"""The agent of one node: it takes part in the rendezvous, and starts and supervises the node's workers."""
