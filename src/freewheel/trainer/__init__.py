"""Learning from scored groups: `FullyAsyncTrainer`, advantages, losses, backends, checkpoints."""
