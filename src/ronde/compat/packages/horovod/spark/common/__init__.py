"""Horovod keeps the stores and backends of its estimators here."""
