"""Placement policies. Pure host logic: nothing here imports jax, flax or mpi4py."""
