"""The configuration of a megasparse model for HuggingFace's classes."""

from typing import Any

from transformers import PretrainedConfig


class MegasparseConfig(PretrainedConfig):
    """Configuration of an exported model. model: the whole `model` section of the run's configuration. seed: of the
    run, on which its hashes depend.
    tokenizer: what a token id means: `bytes` of UTF-8, `pixels`, or the tokenizer of a file in the folder.
    """

    model_type = "megasparse"

    def __init__(
        self, model: dict[str, Any] | None = None, seed: int = 0, tokenizer: str = "bytes", **kwargs: Any
    ) -> None:
        self.model, self.seed, self.tokenizer = model or {}, seed, tokenizer
        source = self.model.get("source")
        shared = source is not None and source.get("shared_embedding", True)
        kwargs["tie_word_embeddings"] = shared or self.model.get("tied_embeddings", False)
        kwargs["is_encoder_decoder"] = source is not None
        if source is not None:
            padding = self.model.get("padding_token")
            kwargs = {"pad_token_id": padding, "decoder_start_token_id": padding or 0, **kwargs}
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return int(self.model["vocabulary"])

    @property
    def hidden_size(self) -> int:
        return int(self.model["d_model"])

    @property
    def num_hidden_layers(self) -> int:
        return int(self.model["layers"])

    @property
    def num_attention_heads(self) -> int:
        return int(self.model["heads"])

    @property
    def is_decoder(self) -> bool:
        return bool(self.model.get("kind", "decoder") == "decoder")

    @property
    def max_position_embeddings(self) -> int:
        """Longest input; of an encoder–decoder what its decoder reads, the start token among it. In a decoder one place
        is the start's, from which the first token is predicted.
        """
        return int(self.model["max_length"]) - self.is_decoder
