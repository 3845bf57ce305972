"""Rows on more than one machine: a Dask cluster, with one copy of the model per worker.

The machine that runs `homespec batch --cluster` reads the rows, hands them out, and alone writes
the output: resume and locks are those of a run on one machine. A worker is a Dask worker that holds
a model and a scheduler; it takes as many rows at once as its scheduler has sequences, by the
resource it offers. That is named after the model's digest, so rows go only where that very model
is. Dask gives the rows of a worker that died to others.
"""
