"""megasparse's architecture for Hugging Face. The code in an exported folder imports the package megasparse."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megasparse.config.schema import Config, ModelConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import HubError
from megasparse.hub.formats import TASKS, Exported, Format, Imported, shapes, sides, unfilled
from megasparse.hub.tensor_file import TensorFile
from megasparse.hub.tokenizer_files import GENERATION, Files, chat_files, own_name, separator
from megasparse.settings.checks import check_model

PREFIX = "model."
_IMPORT = """\
\"\"\"The code of this model is in the package megasparse.\"\"\"

try:
    from {module} as classes
except ImportError as error:
    raise ImportError("this model needs the package megasparse: run pip install -e . in a clone") from error
"""
_CONFIG = """

class {name}(classes.{name}):
    def __init__(self, **settings):
        super().__init__(**settings)
"""
_MODEL = "\n\nclass {name}(classes.{name}):\n    pass\n"
_MODELS = ("Model", "ForCausalLM", "ForMaskedLM", "ForSeq2SeqLM", "ForSequenceClassification")


def code_files(module: str, config: str, models: Sequence[str]) -> Files:
    """Return the Python files of an exported folder. Their classes are subclasses, so that `save_pretrained` copies
    these files. module: "PACKAGE import MODULE" with the classes.
    """
    head = _IMPORT.format(module=module)
    return {
        "configuration_megasparse.py": head + _CONFIG.format(name=config),
        "modeling_megasparse.py": head + "".join(_MODEL.format(name=name) for name in models),
    }


CODE = code_files("megasparse.hub import modelling", "MegasparseConfig", [f"Megasparse{name}" for name in _MODELS])


class MegasparseFormat(Format):
    """Format of megasparse's architecture: config.json contains the `model` section and the run's seed, and tensor
    names are megasparse's with a prefix.
    """

    name = "megasparse"

    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        model, names = config.model, list(shapes(config.model))
        further = () if model.kind == "encoder_decoder" else ("Model", "ForSequenceClassification")
        classes = (TASKS[model.kind], *further)
        autos = {f"AutoModel{name.removeprefix('Model')}": f"modeling_megasparse.Megasparse{name}" for name in classes}
        hf_config = {
            "model_type": self.name,
            "architectures": [f"Megasparse{TASKS[model.kind]}"],
            "auto_map": {"AutoConfig": "configuration_megasparse.MegasparseConfig", **dict(sorted(autos.items()))},
            "dtype": "float32",
            "model": json.loads(model.model_dump_json()),
            "seed": config.run.seed,
            "tokenizer": own_name(build_tokenizer(config.data.tokenizer), model.kind),
            **special_tokens(config),
        }
        longest = model.max_length - (model.kind == "decoder") if model.source is None else model.source.length
        files = {**CODE, **chat_files(config, longest)}
        if model.kind != "encoder":
            settings = json.loads(files.get(GENERATION, "{}"))
            ends = {"eos_token_id": model.end_token} if model.end_token is not None else {}
            files[GENERATION] = json.dumps(ends | settings | generation(config), indent=2) + "\n"
        return Exported(hf_config, lambda: ((PREFIX + name, weight(name)) for name in names), files)

    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        try:
            model = ModelConfig.model_validate(hf_config["model"])
            seed, tokenizer = int(hf_config["seed"]), str(hf_config["tokenizer"])
        except (ValidationError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = f"model.{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise HubError(tensors.path, f"config.json of another version ({reason})", "Use that version") from None
        check_model(model)
        expected = shapes(model)
        tensors.check({PREFIX + name: shape for name, shape in expected.items()})
        sections = {"model": hf_config["model"], "run": {"seed": seed}, "data": {"tokenizer": tokenizer}}
        return Imported(sections, {name: partial(tensors.read, PREFIX + name) for name in expected})

    @torch.no_grad()
    def logits(self, model: Any, tokens: Tensor, seed: int) -> Tensor:
        """Return the logits, of a decoder's first token, which Hugging Face's omit, from the output
        of the last layer.
        """
        if model.config.is_encoder_decoder:
            source, target = sides(tokens, model.model.config)
            return model(input_ids=source, labels=target).logits.float()
        if not model.config.is_decoder:
            return model(input_ids=tokens).logits.float()
        last: list[Tensor] = []
        layer = model.model.layers[-1]
        handle = layer.register_forward_hook(lambda module, inputs, output: last.extend(output[1:]))
        logits = model(input_ids=tokens[:, :-1]).logits
        handle.remove()
        return torch.cat([model.model.logits([x[:, :1] for x in last]), logits], dim=1).float()


def special_tokens(config: Config) -> dict[str, int]:
    """Return the special tokens of an encoder–decoder: padding, also used as the start token, and the separator that
    ends sources and targets.
    """
    model = config.model
    if model.source is None:
        return {}
    end, padding = separator(build_tokenizer(config.data.tokenizer), model), model.padding_token
    tokens = {"eos_token_id": end, "pad_token_id": padding, "decoder_start_token_id": padding or 0}
    return {name: token for name, token in tokens.items() if token is not None}


def generation(config: Config) -> dict[str, Any]:
    """Return the content of generation_config.json. max_length includes the start token."""
    cached = not unfilled(config.model).leaks  # cached outputs cannot change with later tokens
    if config.model.source is None:
        return {"use_cache": cached}
    return {"use_cache": cached, "max_length": config.model.max_length + 1, "num_beams": 1, **special_tokens(config)}


FORMAT = MegasparseFormat()
