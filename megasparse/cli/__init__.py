"""The command `megasparse`: main.py finds the subcommand; a file for each subject declares options and runs them.

These files import what is slow inside their functions, so that help and mistakes are shown at once.
"""
