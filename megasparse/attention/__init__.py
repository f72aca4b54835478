"""Attention mechanisms: `contract.py` says what one is; one file each; `heads.py` keeps the decoding cache."""
