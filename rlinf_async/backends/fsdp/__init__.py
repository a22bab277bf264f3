"""Training with FSDP: `FSDPModelManager`, and PPO on top of it."""
