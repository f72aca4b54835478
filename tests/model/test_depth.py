"""How deep a reader of one forward has to go: frames and files of megasparse between the call and the last line."""

import sys
from pathlib import Path

import megasparse
from megasparse.config.schema import ModelConfig
from megasparse.model.build import build_model
from tests.helpers.models import random_tokens, training_draws

ROOT = Path(megasparse.__file__).parent
FRAMES, FILES = 17, 20


def test_a_forward_of_two_lsh_layers_is_shallow():
    attention = {"pattern": ["lsh"], "lsh": {"chunk": 16, "rounds": 2, "buckets": 16}}
    sizes = {"layers": 2, "d_model": 32, "d_ff": 64, "heads": 2, "vocabulary": 64, "max_length": 256}
    model = build_model(ModelConfig(attention=attention, **sizes), 0)
    tokens, draws = random_tokens(1, 256, 64), training_draws(1)
    frames, deepest, files = [], [], set()

    def see(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT):
            return
        if event == "call":
            frames.append(frame)
            files.add(str(path.relative_to(ROOT)))
            if len(frames) > len(deepest):
                deepest[:] = [f"{entered.f_code.co_filename}:{entered.f_code.co_qualname}" for entered in frames]
        elif event == "return" and frames and frames[-1] is frame:
            frames.pop()

    model(tokens, draws)  # imports, and tables that are kept
    sys.setprofile(see)
    try:
        model(tokens, draws)
    finally:
        sys.setprofile(None)
    assert len(deepest) <= FRAMES, "\n".join(deepest)
    assert len(files) <= FILES, sorted(files)
