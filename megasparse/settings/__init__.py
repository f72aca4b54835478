"""The settings of a run: reading of its JSON file (load.py), and the rules between its keys (checks.py)."""
