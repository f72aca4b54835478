"""The two stacks of an encoder–decoder, each as the configuration of a model of its own."""

from megasparse.config.schema import ModelConfig


def encoder_part(model: ModelConfig) -> ModelConfig:
    """The encoder, which reads the source."""
    source = model.source
    assert source is not None
    own = {
        "kind": "encoder",
        "source": None,
        "max_length": source.length,
        "layers": source.layers or model.layers,
        "positions": source.positions,
        "attention": source.attention,
    }
    return model.model_copy(update=own)


def decoder_part(model: ModelConfig) -> ModelConfig:
    """The decoder, which predicts the target, without its attention to the source."""
    return model.model_copy(update={"kind": "decoder", "source": None})
