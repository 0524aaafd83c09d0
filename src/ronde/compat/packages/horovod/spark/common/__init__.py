"""Horovod keeps the stores, backends and base classes of its estimators here."""
