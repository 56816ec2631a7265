"""Weights from the trainer to the engines: `ParameterSynchronizer`, and the forms of a set of weights in transit."""
