"""Read-only views of a run directory: what it holds, what is lost, and what became of one prompt."""
