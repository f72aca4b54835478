"""Conversations for decoders: rendered by the model's chat template, with a loss on the assistant's tokens only.

A token in the shards is its id, plus a mark if it is not predicted (`files.UNSCORED`). Each conversation ends with the
token that starts the next one, marked as `files.CONVERSATION_END`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megasparse.data.corpora.corpus import (
    MEMBER,
    SAMPLE,
    SOURCE,
    SPLIT_OPTION,
    CorpusSettings,
    CorpusSplits,
    lines,
    option,
)
from megasparse.data.corpora.records import EMPTY, Invalid, Records, Texts, Unfit
from megasparse.data.corpora.source import Part, read
from megasparse.data.corpora.tables import LONGEST_TEXT, JsonLinesCorpus, json_object, json_records
from megasparse.data.encoders import Encoded, PieceEncoder
from megasparse.data.index_file import SEPARATOR
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, DataError, one_line, positive, report_line
from megasparse.files import CONVERSATION_END, UNSCORED

PRECEDING: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Roles, and the roles of the message before; None at the start."""
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
"""Roles by their names in ShareGPT's `conversations`, if they differ."""
OPEN_RECORDS = 32
"""Records that are filled at the same time."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Start of the assistant's tokens in a chat template that marks them."""
QUOTED = re.compile("(\ufdd0[^\ufdd1]*\ufdd1)")
"""Name of a special token in a message, which is text, between two characters that no text contains."""
ANSWER = "\ufdd2"
"""Stands for an answer whose place in a conversation is searched, or for the name of a called tool."""
KEY = 4
"""Characters by which the end of a turn is searched."""
FORM = 'write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
MARK = "or mark the answers in the chat template with {% generation %}"


class Chats(JsonLinesCorpus):
    """Conversations in JSON lines, for decoders: each line has `messages` of the roles system, user, assistant and
    tool (and `tools`), `conversations` of ShareGPT, `prompt` and `completion`, or `text`.

    Messages are rendered by the chat template next to the tokenizer.json. Only the assistant's tokens are predicted,
    without messages of `weight` 0; of a `text` all. A record of --length tokens contains whole conversations; longer
    ones are cut at their end and counted. Invalid lines are left out and counted, up to 1%. It requires
    `pip install -e '.[hf]'`.
    """

    EXAMPLE = "--source chats.jsonl --tokenizer models/smollm2/tokenizer.json --length 4096 --output data/chats"

    FILE = option("--tokenizer", required=True, metavar="FILE", help="tokenizer.json next to the chat template")
    LENGTH = option(
        "--length", type=positive, default=4096, metavar="TOKENS", help="of a record (default: %(default)s)"
    )
    START_HELP = "first token of the model's sequences (default: the tokenizer's bos_token or eos_token)"
    START = option("--start-token", type=int, metavar="ID", help=START_HELP)
    OPTIONS: ClassVar = SOURCE | MEMBER | SAMPLE | FILE | LENGTH | START | SPLIT_OPTION

    def texts(self, settings: CorpusSettings) -> Texts:
        return _renderer(settings)

    def about(self, source: Any, settings: CorpusSettings) -> dict[str, Any]:
        """Add the number of conversations that are cut, and `model.document_separator`, and report the numbers."""
        facts, length = super().about(source, settings), settings["length"]
        lengths = np.concatenate([*source.lengths()]) // ChatEncoder.width
        cut, tokens = int((lengths > length).sum()), int(np.minimum(lengths, length).sum())
        report = f"{sum(facts['documents'].values()):,} conversations, of which {cut:,} are cut to {length:,} tokens"
        if left_out := facts["left_out"]:
            report += f"; left out: {', '.join(f'{count:,} {reason}' for reason, count in left_out.items())}"
        if damaged := [file.first_damaged[0] for file in source.examined if file.first_damaged]:
            report += f"; the first invalid line is {damaged[0]}"
        report_line(source.name, f"{report}; {tokens:,} tokens in all")
        return {**facts, "cut": cut, SEPARATOR: CONVERSATION_END + _renderer(settings).start}

    def encoder(self, settings: CorpusSettings) -> "ChatEncoder":  # type: ignore[override]
        return ChatEncoder(settings["tokenizer"], settings["length"])

    def splits(self, source: Any, settings: CorpusSettings) -> CorpusSplits:
        filler = UNSCORED + _renderer(settings).start
        for name, group in groupby(source.all_texts(), key=itemgetter(0)):
            yield name, [packed((np.frombuffer(text, "<u4") for _, text in group), settings["length"], filler)]


class ChatEncoder(PieceEncoder):
    """Records of marked tokens, as they are."""

    width = 4

    def __init__(self, tokenizer: str, length: int):
        built = build_tokenizer(tokenizer)
        self.name, self.sha256, self.file, self.record = built.name, built.sha256, built.file, length

    def encode(self, piece: bytes) -> Encoded:
        return Encoded(np.frombuffer(piece, "<u4"), 0, 0)


def packed(conversations: Iterable[np.ndarray], length: int, filler: int) -> Iterator[bytes]:
    """Yield records of `length` tokens, whose rest is `filler`. A conversation goes whole into the fullest record that
    has room for it; longer ones than a record are cut at their end.
    """
    records: list[np.ndarray] = []

    def filled(record: np.ndarray) -> bytes:
        return np.pad(record, (0, length - len(record)), constant_values=filler).tobytes()

    for conversation in conversations:
        tokens = conversation[:length]
        room = [record for record in records if len(record) + len(tokens) <= length]
        record = max(room, key=len, default=tokens[:0])
        records = [*(other for other in records if other is not record), np.append(record, tokens)]
        fullest = max(records, key=len)
        if len(fullest) == length or len(records) > OPEN_RECORDS:
            records = [other for other in records if other is not fullest]
            yield filled(fullest)
    yield from map(filled, records)


def is_chat(record: Any) -> bool:
    """True if an object of JSON is a conversation, not a text. Merged tables contain null for other forms."""
    forms = ("messages",), ("conversations",), ("prompt", "completion")
    return isinstance(record, dict) and any(all(record.get(key) is not None for key in keys) for keys in forms)


def contains_chats(parts: Iterable[Part]) -> bool:
    """True if one of the first 100 lines of some file is a conversation."""
    heads = (islice(lines(read(part), LONGEST_TEXT), 100) for part in parts)
    return any(is_chat(json_object(line)) for head in heads for _, line in head if line)


def _renderer(settings: CorpusSettings) -> "Renderer":
    tokenizer, start = settings["tokenizer"], settings.get("start_token")
    if start is None:
        package = _chat_tokenizer(tokenizer)
        start = package.eos_token_id if package.bos_token_id is None else package.bos_token_id
    if start is None:
        raise ConfigError("--start-token", f"{tokenizer} defines neither bos_token nor eos_token", "Give its id")
    return Renderer(tokenizer, settings["length"], start)


@lru_cache(maxsize=1)
def _chat_tokenizer(file: str) -> Any:
    """Return the tokenizer of transformers for a tokenizer.json and the files next to it. Offsets include white space.

    Raises ConfigError if there is none, and DataError if transformers is not installed.
    """
    with DataError.instead_of(ImportError, "transformers", "it is not installed", "Run: pip install -e '.[hf]'"):
        from tokenizers.processors import ByteLevel
        from transformers import PreTrainedTokenizerFast
    if Path(file).name != "tokenizer.json":
        raise ConfigError("data.tokenizer", f"{file} lacks a chat template", "Name a decoder's tokenizer.json")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(Path(file).parent), local_files_only=True)
    except Exception as error:  # transformers raises errors of any type
        raise ConfigError("data.tokenizer", f"{file} does not load ({one_line(str(error))})", "Copy it again") from None
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    return tokenizer


_text_tokenizer = lru_cache(maxsize=1)(build_tokenizer)


@dataclass(frozen=True)
class Renderer:
    """Renders the lines of a file to marked tokens; pickled to the worker processes."""

    file: str
    """The tokenizer.json."""
    length: int
    start: int
    """First token of the model's sequences."""

    def __call__(self, part: Part, column: str) -> Records:
        return json_records(part, self.tokens)

    def tokens(self, record: dict[str, Any]) -> bytes | Unfit:
        """Return the marked tokens, uint32. Raises Invalid, and ConfigError without a chat template."""
        tokenizer = _text_tokenizer(self.file)
        if not is_chat(record) and isinstance(text := record.get("text"), str):
            if not text.strip():
                return EMPTY
            ends = [] if tokenizer.separator is None else [tokenizer.separator]
            ids = np.append(tokenizer.encode(text).numpy(), ends).astype(np.int64)
            scored = np.ones(len(ids), dtype=bool)
        else:
            ids, scored = self._rendered(_messages(record), _tools(record))
        if not scored.any():
            raise Invalid("the chat template renders no answer", "use the model's own template")
        if ids.max() >= tokenizer.vocabulary:
            raise ConfigError("data.tokenizer", f"{self.file} lacks its template's token {ids.max()}", "Copy it again")
        if ids[0] == self.start:
            ids, scored = ids[1:], scored[1:]
        marked = np.append(np.where(scored, ids, ids + UNSCORED), CONVERSATION_END + self.start)
        if not (marked[: self.length] < UNSCORED).any():
            return Unfit(f"no token of an answer within {self.length:,} tokens")
        return marked.astype("<u4").tobytes()

    def _rendered(self, messages: list[dict[str, Any]], tools: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, and a mask of the assistant's. Names of special tokens in it are text."""
        tokenizer = _chat_tokenizer(self.file)
        answers = {i: x.pop("weight", None) != 0 for i, x in enumerate(messages) if x["role"] == "assistant"}
        if tokenizer.chat_template is None:
            folder, hint = Path(self.file).parent, "Use an instruction-tuned model, or add its chat_template.jinja"
            raise ConfigError("data.tokenizer", f"{folder} lacks a chat template, which conversations need", hint)
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        names = map(re.escape, sorted(special, key=len, reverse=True))
        plain = re.sub("[\ufdd0\ufdd1]", "", json.dumps([messages, tools], ensure_ascii=False))
        plain.encode()  # raises UnicodeEncodeError for half a surrogate pair
        quoted = re.sub("|".join(names) or "(?!)", "\ufdd0\\g<0>\ufdd1", plain)
        messages, tools = json.loads(quoted)

        def render(count: int, prompt: bool = False, answers: Sequence[Any] = ()) -> str:
            shown = [*messages[:count], *answers]
            return tokenizer.apply_chat_template(shown, tools=tools, tokenize=False, add_generation_prompt=prompt)

        try:
            whole = render(len(messages))
            for i, message in enumerate(messages):
                calls = [_changed(call, name=ANSWER) for call in message.get("tool_calls", ())]
                if calls and render(i, answers=[{**message, "tool_calls": calls}]).count(ANSWER) < len(calls):
                    raise Invalid(
                        "the chat template leaves tool_calls out", "use a model with tools, or write calls as text"
                    )
            if GENERATION.search(tokenizer.get_chat_template(None, tools)):
                if quoted != plain:
                    raise Invalid("a message contains the name of a special token", "remove it from the text")
                options = {"return_assistant_tokens_mask": True, "tokenizer_kwargs": {"split_special_tokens": False}}
                both = tokenizer.apply_chat_template(messages, tools=tools, **options)
                scored = np.array(both["assistant_masks"], dtype=bool)
                if not all(answers.values()):
                    scored = _weighted(scored, list(answers.values()))
                return np.array(both["input_ids"]), scored
            if re.search("[\ufdd0\ufdd1]", QUOTED.sub("", whole)):
                raise Invalid("the chat template cuts the name of a special token in a message", "remove the name")
            spans = [_span(render, whole, i) for i, weight in answers.items() if weight]
        except Invalid:
            raise
        except Exception as error:  # templates raise errors of any type
            raise Invalid(
                f"the chat template fails: {one_line(str(error))}", "use roles and contents that it accepts"
            ) from None
        ids, first, end = _encoded(tokenizer, whole)
        scored = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:
            if any(((first < border) & (border < end)).any() for border in (start, stop)):
                hint = f"remove white space at the start of answers, {MARK}"
                raise Invalid("a token contains the end of a prompt and the start of an answer", hint)
            scored |= (start <= first) & (first < stop)
        return ids, scored


def _span(render: Callable[..., str], whole: str, number: int) -> tuple[int, int]:
    """Return the characters of `whole` that the assistant's message of this number adds.

    If a template drops the reasoning of earlier answers, the rest is the end of the turn as rendered in last place.
    """
    prompt, turn = render(number, True), render(number + 1)
    if not whole.startswith(prompt):
        before = render(number, answers=[{"role": "assistant", "content": ANSWER}]).partition(ANSWER)[0]
        if prompt.startswith(before):  # as of DeepSeek-R1: it starts the reasoning, which answers lack
            prompt = before
    start = len(prompt)
    if whole.startswith(prompt) and turn.startswith(prompt):
        turn, key = turn[start:], whole[start : start + KEY]
        cut = turn.find(key)
        while cut >= 0:
            if whole.startswith(turn[cut:], start):
                return start, start + len(turn) - cut
            cut = turn.find(key, cut + 1)
    reason = "the chat template renders messages otherwise when others follow, so its answers cannot be located"
    raise Invalid(reason, f"split it into conversations that end with an answer, {MARK}")


def _weighted(mask: np.ndarray, weights: Sequence[bool]) -> np.ndarray:
    """Return the mask of the assistant's tokens without the answers of weight 0."""
    starts = mask & ~np.append(False, mask[:-1])
    if starts.sum() != len(weights):
        raise Invalid("the chat template does not mark each answer once, which weights need", "remove the weights")
    return mask & np.array([False, *weights])[starts.cumsum()]


def _encoded(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids of a rendered conversation, and the first character and the end of each, int64 (length,)."""
    parts, offset = [], 0
    for number, piece in enumerate(QUOTED.split(text)):
        is_name = number % 2
        options = {"add_special_tokens": False, "split_special_tokens": bool(is_name), "return_offsets_mapping": True}
        encoded = tokenizer(piece[1:-1] if is_name else piece, **options, verbose=False)
        borders = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2) + offset + is_name
        parts.append(np.column_stack([np.array(encoded["input_ids"], dtype=np.int64), borders]))
        offset += len(piece)
    ids, first, end = np.concatenate(parts).T
    return ids, first, end


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Invalid("its tools are not a list of objects", "write a JSON schema for each tool")
    return tools or None


def _called(calls: Any) -> list[Any]:
    """Return tool calls with arguments in JSON parsed, as templates expect them."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Invalid("its tool_calls are not a list of objects", "write the name and arguments of each call")
    parsed = []
    for call in calls:
        function = call.get("function") or call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Invalid("a tool call lacks a name", 'write {"function": {"name": "...", "arguments": {}}}')
        text = function.get("arguments")
        if isinstance(text, str) and isinstance(arguments := json_object(text.encode()), dict):
            call = _changed(call, arguments=arguments)
        parsed.append(call)
    return parsed


def _changed(call: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a tool call whose function has these fields; calls may also be functions themselves."""
    return {**call, "function": {**call["function"], **fields}} if call.get("function") else {**call, **fields}


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return ShareGPT's `conversations` as messages."""
    turns, system = record.get("conversations"), record.get("system")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        speaker = turn.get("from", turn.get("role"))
        content = turn.get("value", turn.get("content"))
        role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
        messages.append({**turn, "role": role, "content": content})
    return messages


def _text_of(part: Any) -> Any:
    """Return the text of a part of a content; of an image, also one with a text, None."""
    if not isinstance(part, dict):
        return part
    return part.get("text") if str(part.get("type") or "text").endswith("text") else None


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the checked messages of a record, with contents as strings. Raises Invalid."""
    if not is_chat(record):
        raise Invalid('no "messages", "conversations", "prompt" and "completion", or "text"', FORM)
    messages = _turns(record) if record.get("messages") is None else record["messages"]
    if messages is None and "prompt" in record:
        prompt, completion = (
            [{"role": role, "content": side}] if isinstance(side, str) else side
            for role, side in (("user", record.get("prompt")), ("assistant", record.get("completion")))
        )
        messages = [*prompt, *completion] if isinstance(prompt, list) and isinstance(completion, list) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Invalid("its messages are not a list of objects", FORM)
    checked, before = list[dict[str, Any]](), None
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in PRECEDING:
            raise Invalid(f"unknown role {one_line(repr(role), 40)}", f"use {', '.join(PRECEDING)}")
        if before not in PRECEDING[role]:
            position = f"follows one of the role {before}" if before else "is the first"
            raise Invalid(f"a message of the role {role} {position}", "order the roles as system, user, assistant, ...")
        if isinstance(content, list):
            texts: list[Any] = [_text_of(part) for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else texts
        if message.get("function_call"):
            raise Invalid("function_call, which chat templates do not read", "write tool_calls and the role tool")
        if not isinstance(content, str | None):
            raise Invalid(f"the content of a message of the role {role} is not text", "keep its text only")
        may_be_empty = content is not None if role == "tool" else role == "assistant" and message.get("tool_calls")
        if not (content or "").strip() and not may_be_empty:
            raise Invalid(f"a message of the role {role} is empty", "fill it, or remove the conversation")
        if (weight := message.get("weight")) not in (None, 0, 1) or (weight and role != "assistant"):
            raise Invalid(
                f"weight {one_line(repr(weight), 40)} of a message of the role {role}",
                "give answers 0 or 1, others none",
            )
        # merged tables contain null or [] for keys that other messages have; templates test whether a key exists
        fields = {key: value for key, value in message.items() if value not in (None, [])}
        calls = {"tool_calls": _called(message["tool_calls"])} if message.get("tool_calls") else {}
        checked.append({**fields, "content": content, **calls})
        before = role
    if all(message["role"] != "assistant" or message.get("weight") == 0 for message in checked):
        raise Invalid("no message of the role assistant, whose tokens are learned", "add the answer to learn")
    return checked
