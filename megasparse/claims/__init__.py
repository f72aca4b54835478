"""The papers' claims, tried at a size that a machine can bear: a file for each group, and one command for all."""
