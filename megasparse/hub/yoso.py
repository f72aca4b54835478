"""HuggingFace's YOSO, `YosoForMaskedLM`, and ours of `style` bert with YOSO attention."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasparse.attention.heads import build_mechanism
from megasparse.attention.yoso import YOSOAttention
from megasparse.config.schema import Config, ModelConfig
from megasparse.hub.bert import BERTFormat, Weight, not_ours

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class YOSOFormat(BERTFormat):
    """BERTFormat with YOSO's attention. What is to know of HuggingFace's:

    Hashing (`use_expectation` false) runs in a CUDA kernel that transformers fetches as it is needed; without it there
    is nothing to run. And its hashes are others than ours, drawn anew at each call. So `outputs` of such a model are
    those of its expectation, the mean over all hashes, to be compared with ours under `comparable`: it has every
    parameter and the same code length. Gaussian hashing (`use_fast_hash` false) gives each query the code of the key at
    its own position, by a slip of that code; ours hashes the query.

    Padding: its model hands on an attention_mask of 1 (a token) and 0 (padding), and its layers take it for one of 0
    and −10,000. So its attention sees padding, and only the convolution does not; in ours neither does. Batches without
    padding come out the same.

    Not expressible there, and refused: other numbers of hashes in evaluation than in training. Not expressible here,
    and refused: hashing with the expectation's gradients (`lsh_backward` false).
    """

    name = "yoso"
    architecture = "YosoForMaskedLM"
    attention = "yoso"
    offset = 2
    ignored = ("yoso.embeddings.position_ids", "yoso.embeddings.token_type_ids")

    def attention_of(self, config: Any, path: Path) -> dict[str, Any]:
        if config.hash_code_len > 30:
            raise not_ours(path, "hash_code_len", config.hash_code_len, "30 or less")
        if config.conv_window is not None and config.conv_window % 2 == 0:
            raise not_ours(path, "conv_window", config.conv_window, "odd sizes, or null")
        if not config.use_expectation and not config.lsh_backward:
            raise not_ours(path, "lsh_backward", False, "true where use_expectation is false")
        yoso = {
            "expectation": config.use_expectation,
            "hashes": config.num_hash,
            "code_bits": config.hash_code_len,
            "projection": "hadamard" if config.use_fast_hash else "gaussian",
            "convolution": config.conv_window,
        }
        return {"pattern": ["yoso"], "yoso": yoso}

    def hf_attention(self, model: ModelConfig) -> dict[str, Any]:
        yoso = model.attention.yoso
        self.must_be("attention.yoso.normalization", yoso.normalization, "length")
        if not yoso.expectation:
            self.must_be("attention.yoso.evaluation_hashes", yoso.evaluation_hashes, None, yoso.hashes)
        with torch.device("meta"):
            mechanism = build_mechanism("yoso", model, model.heads)
        assert isinstance(mechanism, YOSOAttention)
        return {
            "use_expectation": yoso.expectation,
            "num_hash": yoso.hashes,
            "hash_code_len": mechanism.code_bits,
            "conv_window": yoso.convolution,
            "use_fast_hash": yoso.projection == "hadamard",
            "lsh_backward": True,
        }

    def attention_weights(self, model: ModelConfig, ours: str, theirs: str) -> Iterator[Weight]:
        if (size := model.attention.yoso.convolution) is not None:
            name = f"{ours}.mechanisms.yoso.convolution.weight"
            yield Weight(name, f"{theirs}.self.conv.weight", (model.heads, 1, size, 1), (model.heads, size))

    def outputs(self, model: "PreTrainedModel", tokens: Tensor, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Outputs as in BERTFormat, of the expectation."""
        parts: list[Any] = [module for module in model.modules() if hasattr(module, "use_expectation")]
        before = [part.use_expectation for part in parts]
        try:
            for part in parts:
                part.use_expectation = True
            yield from super().outputs(model, tokens, seed)
        finally:
            for part, value in zip(parts, before, strict=True):
                part.use_expectation = value

    @staticmethod
    def comparable(config: Config) -> Config:
        """The configuration, of the same parameters, whose outputs are those of `outputs`."""
        yoso = config.model.attention.yoso.model_copy(update={"expectation": True})
        attention = config.model.attention.model_copy(update={"yoso": yoso})
        return config.model_copy(update={"model": config.model.model_copy(update={"attention": attention})})


FORMAT = YOSOFormat()
