"""MPI processes in the slots of a cluster: mpirun runs on the driver's machine, and its daemons in tasks."""
