"""Readers of official files, one module per task, and shared formats (rows, images, tables, texts)."""
