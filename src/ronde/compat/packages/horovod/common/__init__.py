"""What Horovod's frameworks have in common: the errors, and process sets."""
