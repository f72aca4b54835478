"""Complete runs: pretraining, fine-tuning, comparisons and reports."""
