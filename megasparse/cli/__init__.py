"""The command `megasparse`: main.py finds the subcommand, and a file for each subcommand parses its options.

A subcommand's file has a docstring, which is its help; `add_arguments(parser)`; and `run(args)`, which calls the code
that does the work. Such a file imports what is slow inside `run`, so that help and mistakes are shown at once.
"""
