"""Pure functions on tensors, without parameters; one folder or file an operator. They know no other part of megasparse.

Where an operator has several implementations, `reference.py` is its definition (dense, slow, obvious: the oracle of
the tests) and `blockwise.py` what runs.
"""
