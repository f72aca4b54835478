"""The settings of a run: reading of its JSON file (load.py), and the rules between its keys (checks.py).

Above `attention`, whose mechanisms add their sections to the schema when they are imported.
"""
