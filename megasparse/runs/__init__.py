"""Whole runs: what pretraining and fine-tuning are made of, from the configuration to the last checkpoint."""
