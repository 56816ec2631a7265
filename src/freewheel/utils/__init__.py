"""Mechanisms that several packages share: files, processes, waiting, registries. Nothing here knows about training."""
