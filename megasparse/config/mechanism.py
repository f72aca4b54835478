"""What every mechanism's section of `model.attention` has: settings, and what the checks have to know of it."""

import json
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megasparse.config.section import Section
from megasparse.errors import ConfigError

if TYPE_CHECKING:
    from megasparse.config.schema import ModelConfig


class MechanismSection(Section):
    """Settings of one mechanism, and what the checks of a configuration have to know of it."""

    bidirectional_only: ClassVar[str | None] = None
    """Why decoders cannot have it, or None where they can."""
    causal_only: ClassVar[str | None] = None
    """Why encoders cannot have it, or None where they can."""
    replaceable_by_full: ClassVar[bool] = False
    """Whether `full_below` applies: softmax attention inside what hashing alone finds, so that full attention has the
    very same weights. Of a mechanism that trains hashes or a sketch, full attention would leave those untrained."""
    no_probabilities: ClassVar[bool] = False
    """Whether it forms no softmax over keys, so that there are no probabilities to drop."""
    rounds_key: ClassVar[str | None] = None
    """The key that holds the hash rounds (YOSO: hashes) of training, fewer of which take less memory; None where there
    are none."""

    @property
    def rounds_in_evaluation(self) -> Any:
        """Hash rounds (YOSO: hashes) in evaluation and generation: those of the key `evaluation_`
        and `rounds_key`, or, where it is null or missing, those of training. None where there are none."""
        key = self.rounds_key
        return None if key is None else getattr(self, f"evaluation_{key}", None) or getattr(self, key)

    def check(self, key: str, model: "ModelConfig") -> None:
        """Raises ConfigError for the first rule that these settings break, beyond the types. key: where they stand."""

    def check_pretraining(self, key: str, predicted: Literal["token", "answer"]) -> None:
        """Raises ConfigError for what does not fit a pretraining run. predicted: what its stack learns to predict, a
        token at each position, or, in the encoder of an encoder–decoder, the tokens of the answer. key: where these
        settings stand.
        """


def check_band(key: str, window: str, local: bool, sinks: int) -> None:
    for name, given, none in (("local", local, False), ("sinks", sinks, 0)):
        if given and window != "band":
            problem = f'{json.dumps(given)} stands beside a band, but window = "{window}"'
            raise ConfigError(f"{key}.{name}", problem, f'Set it to {json.dumps(none)}, or window to "band"')


def check_sketch(key: str, sketch: str, sketch_heads: int, objective: str, model: "ModelConfig") -> None:
    """Raise ConfigError for settings of a Smart Bird sketch that do not go together."""
    if sketch == "heads" and objective != "attention":
        problem = f'"{objective}" is predicted from values, but sketch = "heads" has queries and keys alone'
        raise ConfigError(f"{key}.objective", problem, 'Set it to "attention"')
    if sketch == "transformer" and objective == "attention":
        problem = '"transformer" is trained by what it predicts, not by attention'
        raise ConfigError(f"{key}.sketch", problem, 'Set it to "heads" or "attention", or change objective')
    if sketch_heads > 1 and sketch != "heads":
        problem = f'{sketch_heads} heads share a sketch, but with sketch = "{sketch}" all of a layer do'
        raise ConfigError(f"{key}.sketch_heads", problem, 'Set it to 1, or sketch to "heads"')
    for entry in model.attention.pattern:
        own = {entry: model.heads} if isinstance(entry, str) else entry
        if (heads := own.get("smart_bird", 0)) % sketch_heads:
            problem = f"{sketch_heads} does not divide the {heads} heads of a layer"
            raise ConfigError(f"{key}.sketch_heads", problem, "Set it to a divisor")
