"""Rows of data: in files, tables and arrays, read in pieces where they do not fit in memory."""
