"""Every attention mechanism by the name that a configuration gives it."""

from collections.abc import Callable
from typing import Any

from megasparse.attention.bigbird import BigBirdAttention
from megasparse.attention.contract import Attention, MechanismSpec
from megasparse.attention.full import FullAttention
from megasparse.attention.lha import LHAAttention
from megasparse.attention.linformer import LinformerAttention
from megasparse.attention.local import LocalAttention
from megasparse.attention.longformer import LongformerAttention
from megasparse.attention.lsh import LSHAttention
from megasparse.attention.ngram import NGramAttention
from megasparse.attention.performer import PerformerAttention
from megasparse.attention.random import RandomAttention
from megasparse.attention.routing import RoutingAttention
from megasparse.attention.smart_bird import SmartBirdAttention
from megasparse.attention.smyrf import SMYRFAttention
from megasparse.attention.sparse_transformer import SparseTransformerAttention
from megasparse.attention.yoso import YOSOAttention

MECHANISMS: dict[str, Callable[[Any, MechanismSpec], Attention]] = {
    "full": FullAttention,
    "local": LocalAttention,
    "lsh": LSHAttention,
    "lha": LHAAttention,
    "random": RandomAttention,
    "routing": RoutingAttention,
    "smart_bird": SmartBirdAttention,
    "smyrf": SMYRFAttention,
    "yoso": YOSOAttention,
    "sparse_transformer": SparseTransformerAttention,
    "longformer": LongformerAttention,
    "bigbird": BigBirdAttention,
    "performer": PerformerAttention,
    "linformer": LinformerAttention,
    "ngram": NGramAttention,
}
"""Each is built of its section of the configuration and its spec."""
