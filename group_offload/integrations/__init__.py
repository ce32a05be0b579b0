"""Ties to other libraries: diffusers and its pipelines, checkpoints of diffusers and transformers, trainers."""
