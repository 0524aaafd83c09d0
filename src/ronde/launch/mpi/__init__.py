"""Processes of MPI in the slots of a cluster: mpirun runs beside the driver, its daemons run in tasks."""
