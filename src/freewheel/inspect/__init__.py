"""Read-only views of a run directory: what it holds, what is lost, and what happened to one prompt."""
