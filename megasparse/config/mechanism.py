"""What every mechanism's section of `model.attention` has: settings, and what the checks have to know of it."""

import json
from typing import TYPE_CHECKING, ClassVar, Literal

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
    def rounds_in_evaluation(self) -> int | None:
        """Hash rounds (YOSO: hashes) in evaluation and generation, or None where there are none."""
        return None

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
