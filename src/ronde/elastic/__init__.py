"""`ronde.elastic`: a job that loses a rank goes on in the processes that are left."""
