"""Downstream tasks: catalog, training and evaluation."""
