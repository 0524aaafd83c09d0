"""The communicator: how ranks find each other, connect, and run collectives in program order."""
