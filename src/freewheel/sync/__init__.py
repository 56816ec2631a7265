"""Weights from the trainer to the engines: `ParameterSynchronizer`, and what a set of weights is on its way."""
