"""Modules that exported folders have in place of packages that they do without."""
