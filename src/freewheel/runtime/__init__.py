"""Runs a training run: configuration, plan, placement, Ray actors, supervision and recovery."""
