"""Attention mechanisms. `contract.py` says what one is; one file each; `heads.py` projects and keeps the decoding
cache.
"""
