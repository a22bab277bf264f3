"""Training with megatron-core: tensor, pipeline, sequence and data parallelism.

This is the only folder that imports megatron.
"""
