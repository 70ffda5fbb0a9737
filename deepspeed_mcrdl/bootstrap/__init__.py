"""How an MPI world is had under any launcher."""
