"""The command `megasparse`: main.py finds the subcommand; a file for each subject declares options and runs them.

These files import slow modules inside functions, so that help and errors are printed quickly.
"""
