"""Workers forked from a process that has done their imports."""
