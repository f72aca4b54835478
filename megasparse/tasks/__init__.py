"""Downstream tasks: the catalog of them, what learns them, and how they are evaluated."""
