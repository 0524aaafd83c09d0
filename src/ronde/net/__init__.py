"""What drives the machine: sockets, stores, processes and their output."""
