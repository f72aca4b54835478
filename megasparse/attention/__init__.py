"""Attention mechanisms. Each module defines a configuration section and a class, and registers both.

The import order fixes the order of the heads in a layer with several mechanisms. Never change it.
"""

# ruff: noqa: F401, I001
from megasparse.attention import full, local, lsh, lha, yoso, smart_bird
from megasparse.attention.baselines import smyrf, routing, random, sparse_transformer, longformer, bigbird
from megasparse.attention.baselines import performer, linformer
from megasparse.attention import ngram, ranked
from megasparse.attention.baselines import linear, synthesizer, sinkhorn, clustered
from megasparse.config.attention import rebuild_schemas

rebuild_schemas()
