"""The command `megasparse`. Files import slow modules inside functions, so that help and errors are printed quickly."""
