"""What decides: pure state machines, without sockets, threads, clocks, randomness or environment."""
