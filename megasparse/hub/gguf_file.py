"""Unpacking of a GGUF file into a folder. transformers reads the tensors and the tokenizer, and skips what it does not
know: every tensor and every key of the architecture must be used. Version 2 or 3, little endian: "GGUF", uint32
version, uint64 tensors, uint64 entries; entries; tensors; their data.

    a text: uint64 length, UTF-8
    an entry: text key, uint32 type, value; an array: uint32 type, uint64 count, values
    a tensor: text name, uint32 dimensions n, n uint64 sizes, uint32 type, uint64 offset
"""

import json
import math
import re
import struct
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

import torch

from megasparse.errors import HubError, one_line, report_line
from megasparse.files import open_file
from megasparse.hub.tensor_file import write_tensors
from megasparse.ops.positions import LLAMA3_TURNS

MAGIC, VERSIONS = b"GGUF", (2, 3)
TEXT, ARRAY, FP32 = 8, 9, 0
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LONGEST_TEXT = 1 << 20  # a chat template has thousands of bytes
MOST_DIMENSIONS = 8
LAYERS = "block_count"
WIDTHS = (
    *(".embedding_length", ".feed_forward_length", ".head_count", ".head_count_kv", ".key_length", ".value_length"),
    *(".vocab_size", ".dimension_count", ".expert_count", ".expert_feed_forward_length"),
)
"""Suffixes of the keys of sizes, at most the largest size of a tensor."""
PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")
"""Name of one of several parts."""
FOLDER = "Use the model's folder of safetensors"

ROTARY = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    LAYERS: "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
KEYS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), ROTARY),
    "gpt2": {
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        LAYERS: "n_layer",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
}
"""Hugging Face's key of each size."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Values of further keys that change nothing."""
UNUSED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotary frequencies."""
_GATED = "attn_norm.w attn_q.w attn_k.w attn_v.w attn_output.w ffn_norm.w ffn_gate.w ffn_up.w ffn_down.w"
TENSORS = {
    "llama": ("token_embd.w output_norm.w", _GATED),
    "qwen2": ("token_embd.w output_norm.w", f"{_GATED} attn_q.b attn_k.b attn_v.b"),
    "qwen3": ("token_embd.w output_norm.w", f"{_GATED} attn_q_norm.w attn_k_norm.w"),
    "gpt2": (
        "token_embd.w position_embd.w output_norm.*",
        "attn_norm.* attn_qkv.* attn_output.* ffn_norm.* ffn_up.* ffn_down.*",
    ),
}
"""Tensors once and per layer. `.w` is `.weight`, `.b` is `.bias`, `.*` is both."""

GPT2_SPLIT = {"default", "gpt-2", "mpt", "olmo", "jais", "trillion", "exaone4"}
DIGIT_SPLIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Ways to split texts for a byte-level vocabulary: GPT-2's, and with single digits."""
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
"""Ways whose vocabulary contains whole words that no merges give."""
NAMES, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are read whole."""


class Array(NamedTuple):
    """An array. values: empty unless its key is NAMES or TYPES."""

    length: int
    values: list[Any]


class Header(NamedTuple):
    """values: metadata. tensors: sizes (the fastest first), type and offset of each tensor. start: byte of offset 0."""

    values: dict[str, Any]
    tensors: dict[str, tuple[list[int], int, int]]
    start: int


class _Bad(Exception):
    pass


def unpack_gguf(path: Path) -> TemporaryDirectory[str]:
    """Unpack the model of a GGUF file into a folder, dequantised to fp32 by transformers."""
    header = check_gguf(path)
    values = config_of(path, header)
    if find_spec("gguf") is None:
        raise HubError("gguf", "is not installed; it reads GGUF files", "Install it: pip install gguf")
    import transformers

    source = {"gguf_file": path.name, "local_files_only": True}
    with HubError.instead_of(Exception, path, "transformers cannot load it ({})", FOLDER):  # gguf raises any type
        config = transformers.AutoConfig.for_model(**values)
        options = {"config": config, "dtype": torch.float32, "output_loading_info": True, **source}
        options["ignore_mismatched_sizes"] = True  # its error does not name the tensor
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)
        model, info = loaded
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **source)
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise HubError(path, f"{name} has shape {list(shape)}, but {list(expected)} by its metadata", FOLDER)
    if lost := sorted(info["missing_keys"]):
        raise HubError(path, f"transformers finds no {lost[0]} in it", FOLDER)
    folder = TemporaryDirectory()
    tokenizer.save_pretrained(folder.name)
    _correct_tokenizer(Path(folder.name) / "tokenizer.json", header)
    values = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    (Path(folder.name) / "config.json").write_text(json.dumps(values), encoding="utf-8")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    write_tensors(((name, x) for name, x in model.state_dict().items() if name not in tied), Path(folder.name))
    return folder


def config_of(path: Path, header: Header) -> dict[str, Any]:
    """Return the content of config.json. Raises HubError for a tensor or a key that is missing or would be lost."""
    name = header.values.get("general.architecture")
    if header.values.get("split.count", 1) != 1 or PART.search(path.name):
        raise HubError(
            path, "is one part of a model in several files", "Merge: llama-gguf-split --merge FIRST WHOLE.gguf"
        )
    if name not in KEYS:
        raise HubError(path, f"its architecture is {one_line(str(name), 60)!r}", f"Use one of {', '.join(KEYS)}")
    prefix = f"{name}."
    left = {key.removeprefix(prefix): x for key, x in header.values.items() if key.startswith(prefix)}
    for key, value in left.items():
        if isinstance(value, Array) or (isinstance(value, str) and key not in (*UNUSED, "rope.scaling.type")):
            raise _lost(path, prefix + key, value)

    def number(key: str, default: float | None = None) -> Any:
        value = left.pop(key, default)
        fraction = key.endswith(("epsilon", "freq_base"))
        if value is None or not 0 < value < math.inf or not (fraction or isinstance(value, int)):
            raise HubError(path, f"{prefix}{key} is {'missing' if value is None else value}", FOLDER)
        return value

    defaults = {"attention.head_count_kv": left.get("attention.head_count")}
    config = {theirs: number(key, defaults.get(key)) for key, theirs in KEYS[name].items()}
    if name != "gpt2":
        width = left.get("rope.dimension_count", config["hidden_size"] // config["num_attention_heads"])
        config["head_dim"] = head = number("attention.key_length", width)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (size := number(key, head)) != head:
                problem = f"{prefix}{key} is {size}, but megasparse supports only the size of a head, {head}"
                raise HubError(path, problem, "Such models cannot be imported")
        scaling = {key: left.pop(key) for key in [*left] if key.startswith("rope.scaling.") and key not in NEUTRAL}
        base, longest = float(number("rope.freq_base", 10000.0)), config["max_position_embeddings"]
        config["rope_parameters"] = {"rope_theta": base, **_scaling(path, header, scaling, base, head, longest)}
        window = left.pop("attention.sliding_window", 0)
        if 0 < window < longest:
            problem = f"{prefix}attention.sliding_window is {window}, but megasparse supports no window below {longest}"
            raise HubError(path, problem, "Such models cannot be imported")
    for key, value in left.items():
        if key not in UNUSED and value not in NEUTRAL.get(key, ()):
            raise _lost(path, prefix + key, value)
    _check_tensors(path, header, config[KEYS[name][LAYERS]], name)
    config["vocab_size"] = math.prod(header.tensors["token_embd.weight"][0][1:])
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    _check_tokenizer(path, header.values)
    first, last = (1, 2) if header.values["tokenizer.ggml.model"] == "llama" else (None, None)  # llama.cpp's defaults
    for token, key, default in (("bos", "bos", first), ("eos", "eos", last), ("pad", "padding", None)):
        config[f"{token}_token_id"] = header.values.get(f"tokenizer.ggml.{key}_token_id", default)
    return {"model_type": name, **config}


def _lost(path: Path, key: str, value: Any) -> HubError:
    shown = f"{value.length} values" if isinstance(value, Array) else one_line(str(value), 80)
    return HubError(path, f"{one_line(key, 80)} is {shown}, which an import would lose", FOLDER)


def _check_tensors(path: Path, header: Header, layers: int, name: str) -> None:
    ends = {"w": ("weight",), "b": ("bias",), "*": ("weight", "bias")}
    once, per_layer = (
        [tensor[:-1] + end for tensor in names.split() for end in ends[tensor[-1]]] for names in TENSORS[name]
    )
    expected = [*once, *(f"blk.{layer}.{tensor}" for layer in range(layers) for tensor in per_layer)]
    optional = {"output.weight", *([] if name == "gpt2" else [FREQUENCIES])}
    if missing := [tensor for tensor in expected if tensor not in header.tensors]:
        raise HubError(path, f"contains no tensor {missing[0]}", "Use a complete GGUF file")
    if unknown := [tensor for tensor in header.tensors if tensor not in {*expected, *optional}]:
        raise HubError(path, f"contains a tensor {one_line(unknown[0], 80)}, which an import would lose", FOLDER)


def _scaling(
    path: Path, header: Header, values: dict[str, Any], base: float, head_dim: int, longest: int
) -> dict[str, Any]:
    """Return rope_type and its settings. values: the keys rope.scaling.*, with llama.cpp's meaning."""
    left = {key.removeprefix("rope.scaling."): value for key, value in values.items() if key not in UNUSED}
    factor, temperature = float(left.pop("factor", 0) or 1), float(left.pop("attn_factor", 1))
    kind = left.pop("type", "none" if factor == 1 else "linear")
    original = left.pop("original_context_length", longest)
    result: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind not in ("none", "linear", "yarn"):
        raise _lost(path, "rope.scaling.type", kind)
    if not 0 < factor < math.inf:
        raise _lost(path, "rope.scaling.factor", factor)
    if kind == "yarn":
        turns = {key: float(left.pop(f"yarn_{key}")) for key in ("beta_fast", "beta_slow") if f"yarn_{key}" in left}
        result |= {"original_max_position_embeddings": original, **turns}
        if temperature != 1:
            result["attention_factor"] = temperature * (1 + 0.1 * math.log(factor))
    elif temperature != 1:
        left["attn_factor"] = temperature
    for key, value in left.items():
        raise _lost(path, f"rope.scaling.{key}", value)
    if FREQUENCIES in header.tensors:
        if kind != "none":
            raise HubError(path, f"contains {FREQUENCIES} and rope.scaling.type {kind!r}, two scalings", FOLDER)
        return _llama3(path, header, base, head_dim // 2)
    return {"rope_type": "default"} if kind == "none" else result


def _llama3(path: Path, header: Header, base: float, pairs: int) -> dict[str, Any]:
    """Return the settings of Llama 3's scaling with the file's divisors of the frequencies."""
    sizes, kind, offset = header.tensors[FREQUENCIES]
    with open_file(path) as stream:
        stream.seek(header.start + offset)
        raw = stream.read(4 * pairs)
    if sizes != [pairs] or kind != FP32 or len(raw) < 4 * pairs:
        raise HubError(path, f"{FREQUENCIES} is not {pairs} numbers in fp32", FOLDER)
    divisors = struct.unpack(f"<{pairs}f", raw)
    wavelengths = [2 * math.pi * base ** (pair / pairs) for pair in range(pairs)]
    factor, (low, high) = max(divisors), LLAMA3_TURNS
    if set(divisors) == {1.0}:
        return {"rope_type": "default"}

    def divisor(wavelength: float, original: int) -> float:
        share = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        return 1 / ((1 - share) / factor + share)

    lengths = [1 << power for power in range(4, 31)]  # without a blended frequency, lengths in between are equivalent
    for value, wavelength in zip(divisors, wavelengths, strict=True):
        if 1 < value < factor < math.inf:
            share = (1 / value - 1 / factor) / (1 - 1 / factor)
            lengths.insert(0, round(wavelength * (low + share * (high - low))))
    for original in lengths if 1 < factor < math.inf else ():
        expected = [divisor(wavelength, original) for wavelength in wavelengths]
        if all(math.isclose(*both, rel_tol=1e-5) for both in zip(divisors, expected, strict=True)):
            turns = {"low_freq_factor": low, "high_freq_factor": high}
            return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original, **turns}
    raise HubError(path, f"{FREQUENCIES} contains other frequencies than Llama 3's scaling", FOLDER)


def _check_tokenizer(path: Path, values: dict[str, Any]) -> None:
    """Raise HubError if transformers, corrected by `_correct_tokenizer`, cannot split texts as the model's tokenizer;
    report a file that does not specify it.
    """
    kind, split = (values.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    arrays = (values.get(NAMES), values.get(TYPES, Array(0, [])))
    if kind not in ("llama", "gpt2") or not all(isinstance(array, Array) for array in arrays):
        raise HubError(path, f"tokenizer.ggml.model is {one_line(str(kind), 60)}, which cannot be imported", FOLDER)
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    known = {None, *GPT2_SPLIT, *DIGIT_SPLIT, *GGUF_PRE_TOKENIZER_SPLITS}
    if kind == "gpt2" and split not in known:
        problem = f"tokenizer.ggml.pre is {one_line(str(split), 60)}, a way to split texts that transformers lacks"
        raise HubError(path, problem, f"{FOLDER}, with its tokenizer.json")
    if kind == "gpt2" and split in (None, "default") and values["general.architecture"] != "gpt2":
        report_line(path, f"tokenizer.ggml.pre is {split or 'missing'}: texts are split as GPT-2's")


def _correct_tokenizer(file: Path, header: Header) -> None:
    """Correct the tokenizer.json of transformers, which, for a byte-level vocabulary, adds <|endoftext|>, spells
    special tokens outside ASCII in bytes, splits unknown kinds of texts as GPT-2's, and always merges.
    """
    content, split = json.loads(file.read_text(encoding="utf-8")), header.values.get("tokenizer.ggml.pre")
    names, types = header.values[NAMES].values, header.values.get(TYPES, Array(0, [])).values
    added = {token["id"]: token for token in content["added_tokens"] if token["id"] < len(names)}
    if header.values["tokenizer.ggml.model"] == "gpt2":
        spelled = {number: name for name, number in content["model"]["vocab"].items()}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for number, (name, kind) in enumerate(zip(names, types, strict=False)):
            if kind in (CONTROL, USER_DEFINED) and spelled.get(number) != name and name not in spelled.values():
                content["model"]["vocab"].pop(spelled.get(number), None)
                content["model"]["vocab"][name] = number
                added[number] = {"id": number, "content": name, "special": kind == CONTROL, **flags}
        content["model"]["ignore_merges"] = split in WHOLE_WORDS
        if split in DIGIT_SPLIT:
            parts = [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]]
            content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    content["added_tokens"] = [added[number] for number in sorted(added)]
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def check_gguf(path: Path) -> Header:
    """Read the header. Raise HubError if it contradicts the file's size: readers trust it, and
    would loop or allocate.
    """
    with (
        HubError.instead_of(_Bad, path, "damaged GGUF file: {}", "Download it again"),
        HubError.instead_of(OSError, path, "cannot be read: {}", "Use the path of a GGUF file"),
    ):
        size = path.stat().st_size
        if not path.is_file():
            raise _Bad("it is not a regular file")
        with open_file(path) as stream:
            return _header(stream, size)


def _header(stream: IO[bytes], size: int) -> Header:
    if stream.read(4) != MAGIC or _number(stream, "I") not in VERSIONS:
        raise _Bad("its first bytes are not those of version 2 or 3")
    tensors, entries = _number(stream, "Q"), _number(stream, "Q")
    if 24 * tensors + 12 * entries > size:
        raise _Bad(f"its {size:,} bytes cannot contain {tensors:,} tensors and {entries:,} entries")
    values: dict[str, Any] = {}
    for _ in range(entries):
        key = _text(stream, size)
        values[key] = _value(stream, _number(stream, "I"), size, key in (NAMES, TYPES))
    widest, places = 0, dict[str, tuple[list[int], int, int]]()
    for _ in range(tensors):
        name = _text(stream, size)
        if (dimensions := _number(stream, "I")) > MOST_DIMENSIONS:
            raise _Bad(f"a tensor has {dimensions:,} dimensions")
        sizes = [_number(stream, "Q") for _ in range(dimensions)]
        widest, kind = max(widest, *sizes, 0), _number(stream, "I")
        if (offset := _number(stream, "Q")) > size:
            raise _Bad(f"a tensor starts at byte {offset:,} of {size:,}")
        places[name] = sizes, kind, offset
    for key, value in values.items():
        if not isinstance(value, int):
            continue
        if key.endswith(f".{LAYERS}") and value > tensors:
            raise _Bad(f"it has {value:,} layers, more than its {tensors:,} tensors")
        if key.endswith(WIDTHS) and value > widest:
            raise _Bad(f"{one_line(key, 60)} is {value:,}, larger than any size of a tensor, at most {widest:,}")
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Bad(f"general.alignment is {alignment}")
    return Header(values, places, -(-stream.tell() // alignment) * alignment)


def _number(stream: IO[bytes], letter: str) -> Any:
    width = struct.calcsize(f"<{letter}")
    raw = stream.read(width)
    if len(raw) < width:
        raise _Bad("its header is cut off")
    return struct.unpack(f"<{letter}", raw)[0]


def _text(stream: IO[bytes], size: int) -> str:
    length = _number(stream, "Q")
    if length > min(LONGEST_TEXT, size - stream.tell()):
        raise _Bad(f"a text of {length:,} bytes")
    return stream.read(length).decode(errors="replace")


def _value(stream: IO[bytes], kind: int, size: int, reads_array: bool) -> Any:
    """Return a value, of an array only if `reads_array`."""
    if kind in SCALARS:
        return _number(stream, SCALARS[kind])
    if kind == TEXT:
        return _text(stream, size)
    if kind != ARRAY:
        raise _Bad(f"a value of type {kind}")
    inner, count = _number(stream, "I"), _number(stream, "Q")
    width = struct.calcsize(f"<{SCALARS[inner]}") if inner in SCALARS else 8 if inner == TEXT else 0
    if not width or count * width > size - stream.tell():
        raise _Bad(f"an array of {count:,} values of type {inner}")
    values: list[Any] = []
    if inner == TEXT:
        for _ in range(count):
            text = _text(stream, size)
            if reads_array:
                values.append(text)
    elif reads_array:
        values = list(struct.unpack(f"<{count}{SCALARS[inner]}", stream.read(count * width)))
    else:
        stream.seek(count * width, 1)
    return Array(count, values)
