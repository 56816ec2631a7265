"""freewheel: reinforcement-learning post-training in which no accelerator waits for something it does not need."""

__version__ = "0.1.0"
