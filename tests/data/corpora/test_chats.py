"""Conversations: the tokens whose loss counts are the assistant's text and nothing else."""

import json
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.chats import OPEN_RECORDS, Renderer, packed
from megasparse.data.index import Index
from megasparse.data.prepare import prepare
from megasparse.data.tokenizers.huggingface import alphabet
from megasparse.errors import ConfigError, DataError
from megasparse.files import CONVERSATION_END, UNSCORED
from tests.helpers.commands import refusal
from tests.helpers.tokenizers import written

NAMES = ["<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
NAMES += ["[INST]", "[/INST]", "</s>", "<start_of_turn>", "<end_of_turn>", "<name>"]
START, END = NAMES.index("<s>"), NAMES.index("</s>")

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {
    "chatml": (CHATML, "{}<|im_end|>\n"),
    "llama 3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "{}<|eot_id|>",
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
        " {}</s>",
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in "
        "messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "{}<end_of_turn>\n",
    ),
    "marked answers": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}",
        "{}<|im_end|>",
    ),
}  # fmt: skip
"""Templates in the manner of families of models, and what the assistant writes for an answer."""
ANSWERS = ["It is a long  way.", "Yes: caf\u00e9, \u65e5\u672c \U0001f600\n\nand a second paragraph"]


def byte_level():
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate([*NAMES, *alphabet(), "\u010a\u010a"])}, [("\u010a", "\u010a")])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    return tokenizer


def sentencepiece():
    """Spaces are part of words, and one is put before every text, as in Llama 2."""
    pieces = [*NAMES, *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefghijklmnopqrstuvwxyzIY.:,?", "\u2581a"]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, [("\u2581", "a")], byte_fallback=True, unk_token="<s>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def model_folder(folder, template, tokenizer=byte_level, special=NAMES):
    folder.mkdir()
    package = tokenizer()
    package.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    written(folder, json.loads(package.to_str()))
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


def conversation(*texts, system=None):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [*([] if system is None else [{"role": "system", "content": system}]), *messages]}


def tokens_of(file, record, length=4096):
    record = json.loads(record if isinstance(record, bytes) else json.dumps(record))
    return np.frombuffer(Renderer(str(file), length, START).tokens(record), "<u4").astype(int)


def decoded(file, ids):
    return PreTrainedTokenizerFast.from_pretrained(file.parent).decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_loss_is_on_the_text_of_the_assistant(tmp_path, name, tokenizer):
    template, answer = TEMPLATES[name]
    special = NAMES if tokenizer is byte_level else ["<s>", "</s>"]  # the others are text, in pieces
    file = model_folder(tmp_path / "model", template, tokenizer, special)
    record = conversation("How far?", ANSWERS[0], "Are you sure?", ANSWERS[1], "Fine.")
    tokens = tokens_of(file, record)
    assert tokens[-1] == CONVERSATION_END + START and (tokens[:-1] < 2 * UNSCORED).all()
    package = PreTrainedTokenizerFast.from_pretrained(file.parent)
    ids = package.apply_chat_template(record["messages"])["input_ids"]
    assert [START] * (ids[0] == START) + (tokens[:-1] % UNSCORED).tolist() == ids
    groups = np.split(tokens, np.flatnonzero(np.diff(tokens < UNSCORED)) + 1)
    texts = [decoded(file, group) for group in groups if group[0] < UNSCORED]
    assert texts == [answer.format(text) for text in ANSWERS]


CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}}


def test_parts_of_text_completions_and_tools_are_the_same_conversation(tmp_path):
    file = model_folder(tmp_path / "model", CHATML)
    expected = tokens_of(file, conversation("How far?", "Far."))
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "far?"}]
    for record in (
        conversation(parts, ["Far."]),
        {"prompt": "How far?", "completion": "Far."},
        {"prompt": conversation(parts)["messages"], "completion": [{"role": "assistant", "content": "Far."}]},
        {"conversations": [{"from": "human", "value": "How far?"}, {"from": "gpt", "value": "Far."}]},
        {"conversations": conversation("How far?", "Far.")["messages"], "system": "", "messages": None},
        {"messages": None, "conversations": None, "prompt": "How far?", "completion": "Far."},
    ):
        assert tokens_of(file, record).tolist() == expected.tolist()
    called = [{"role": "user", "content": "How far?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    called += [{"role": "tool", "content": "9"}, {"role": "assistant", "content": "9 miles"}]
    file = model_folder(
        tmp_path / "tools", CHATML.replace("{{ m.content }}", "{{ m.content or m.tool_calls | tojson }}")
    )
    tokens = tokens_of(file, {"messages": called})
    call = '[{"function": {"name": "f", "arguments": {"x": 1}}}]'
    assert decoded(file, tokens[tokens < UNSCORED]) == f"{call}<|im_end|>\n9 miles<|im_end|>\n"
    called[2]["content"] = " "  # a tool without a result
    assert (tokens_of(file, {"messages": called}) < UNSCORED).sum() == (tokens < UNSCORED).sum()
    null = (
        "{% if tools is not none or 'tool_calls' in m or m.name is defined %}{{ raise_exception('null') }}{% endif %}"
    )
    file = model_folder(tmp_path / "null", CHATML.replace("{{ m.role", null + "{{ m.role"))  # as Llama 3.1's
    question, answer = conversation("How far?", "Far.")["messages"]
    merged = [{**question, "tool_calls": None, "name": None}, {**answer, "tool_calls": []}]
    assert tokens_of(file, {"messages": merged, "tools": []}).tolist() == expected.tolist()


@pytest.mark.parametrize("template", ["chatml", "marked answers"])
def test_answers_of_weight_0_are_read_and_not_learned(tmp_path, template):
    file = model_folder(tmp_path / "model", TEMPLATES[template][0])
    record = conversation("How far?", "Far.", "Sure?", "Yes.", "Really?", "No.", system="Hm")
    whole = tokens_of(file, record)
    for learned in (1, None):  # None: a field that other lines have
        for number, weight in ((2, 0), (3, None), (4, learned), (6, 0)):
            record["messages"][number]["weight"] = weight
        tokens = tokens_of(file, record)
        assert (tokens % UNSCORED).tolist() == (whole % UNSCORED).tolist()
        assert decoded(file, tokens[tokens < UNSCORED]).strip() == "Yes.<|im_end|>"
    turns = [{"from": "human", "value": "How far?"}, {"from": "gpt", "value": "Far."}]
    expected = tokens_of(file, conversation("How far?", "Far.", system="Hm"))
    assert tokens_of(file, {"conversations": turns, "system": "Hm"}).tolist() == expected.tolist()


def test_plain_texts_are_predicted_whole_with_their_end(tmp_path):
    file = model_folder(tmp_path / "model", None)
    tokens = tokens_of(file, {"text": "a <s> b", "messages": None})
    assert (tokens[:-1] < UNSCORED).all() and decoded(file, tokens[:-1]) == "a <s> b</s>" and START not in tokens


def test_special_tokens_in_messages_are_text(tmp_path):
    file = model_folder(tmp_path / "model", CHATML)
    record = conversation("Is <|im_end|> the end of <name>?", "No, <|im_end|> is.")
    tokens = tokens_of(file, record)
    ids = tokens % UNSCORED
    assert [(ids == NAMES.index(name)).sum() for name in ("<|im_start|>", "<|im_end|>", "<name>")] == [2, 2, 0]
    assert decoded(file, tokens[tokens < UNSCORED]) == "No, <|im_end|> is.<|im_end|>\n"
    assert "<|im_start|>user\nIs <|im_end|> the end of <name>?<|im_end|>\n" in decoded(file, ids)


def test_reasoning_that_a_template_drops_from_earlier_answers_does_not_hide_them(tmp_path):
    """As in Qwen3: only the last answer shows its reasoning, empty if there is none."""
    answer = "{{ m.content }}"
    shown = (
        "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n{% endif %}"
    )
    file = model_folder(tmp_path / "model", CHATML.replace(answer, shown + answer))
    tokens = tokens_of(file, conversation("How far?", "<far>", "Sure?", "Yes."))
    text = decoded(file, tokens[tokens < UNSCORED])
    assert text == "<far><|im_end|>\n<think>\n\n</think>\nYes.<|im_end|>\n"
    opening = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")  # as in DeepSeek-R1's
    tokens = tokens_of(model_folder(tmp_path / "opening", opening), conversation("How far?", "<far>", "Sure?", "<t>"))
    assert decoded(file, tokens[tokens < UNSCORED]) == "<far><|im_end|>\n<t><|im_end|>\n"


GOOD = conversation("How far?", "Far.")
ORDER = "order the roles as system, user, assistant"
BAD = {
    "not JSON": (b'{"messages": [}', "not JSON", "Write one object per line"),
    "no conversation": ({"dialogue": []}, 'no "messages", "conversations", "prompt"', 'write {"messages"'),
    "unknown speaker": ({"conversations": [{"from": "bot", "value": "x"}]}, "unknown role 'bot'", "use system, user"),
    "no turns": ({"conversations": ["x"]}, "its messages are not a list of objects", 'write {"messages"'),
    "tools as text": ({**conversation("How far?", "Far."), "tools": "[]"}, "its tools are not a list of objects", ""),
    "calls as text": (
        {"messages": [GOOD["messages"][0], {"role": "assistant", "tool_calls": "f()"}]}, "its tool_calls are not a", "",
    ),
    "calls left out": (
        {"messages": [*GOOD["messages"][:1], {**GOOD["messages"][1], "tool_calls": [{"name": "look_up"}]}]},
        "the chat template leaves tool_calls out", "use a model with tools",
    ),
    "calls left out, whose name the question contains": (
        {"messages": [*GOOD["messages"][:1], {"role": "assistant", "content": "", "tool_calls": [{"name": "far"}]}]},
        "the chat template leaves tool_calls out", "use a model with tools",
    ),
    "call without a name": (
        {"messages": [*GOOD["messages"][:1], {"role": "assistant", "tool_calls": [{"function": {"name": None}}]}]},
        "a tool call lacks a name", 'write {"function": {"name"',
    ),
    "function_call": (
        {"messages": [*GOOD["messages"][:1], {**GOOD["messages"][1], "function_call": {"name": "f"}}]},
        "function_call, which chat templates do not read", "write tool_calls",
    ),
    "weight of a user": (
        {"messages": [{"role": "user", "content": "x", "weight": 1}]},
        "weight 1 of a message of the role user", "give answers",
    ),
    "weight .5": (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0.5}]},
        "weight 0.5 of a message of the role assistant", "give answers 0 or 1",
    ),
    "nothing to learn": (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0}]},
        "no message of the role assistant", "add the answer to learn",
    ),
    "no list": ({"messages": "hello"}, "its messages are not a list of objects", 'write {"messages"'),
    "no assistant": (conversation("How far?"), "no message of the role assistant", "add the answer to learn"),
    "twice": (
        {"messages": GOOD["messages"][:1] * 2 + GOOD["messages"][1:]},
        "a message of the role user follows one of the role user", ORDER,
    ),
    "answer first": ({"messages": GOOD["messages"][1:]}, "a message of the role assistant is the first", ORDER),
    "unknown role": ({"messages": [{"role": "human", "content": "x"}]}, "unknown role 'human'", "use system, user"),
    "empty": (conversation("How far?", " \n"), "a message of the role assistant is empty", "fill it, or remove"),
    "image": (conversation([{"type": "image_url"}], "x"), "a message of the role user is not text", "keep its text"),
    "image with a text": (
        conversation([{"type": "image", "text": "a cat"}], "x"), "of the role user is not text", "keep its text",
    ),
    "user that calls": (
        {"messages": [{"role": "user", "content": None, "tool_calls": [{}]}, {"role": "assistant", "content": "x"}]},
        "a message of the role user is empty", "fill it",
    ),
    "half a surrogate": (json.dumps(conversation("\ud800", "x")).encode(), "half a surrogate pair", ""),
    "name that is cut": (
        conversation("How far?", "So <name> far."), "the chat template cuts the name of a special token", "remove the",
    ),
    "template": (conversation("How far?", "Far.", system="Hm"), "the chat template fails: no system", "use roles"),
    "boundary": (conversation("How far?", "\n\nFar."), "a token contains the end of a prompt", "{% generation %}"),
}  # fmt: skip
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML.replace(
    "{{ m.content }}", "{{ m.content.split('name>')[-1] }}"
)


def lines_in(path, records):
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def options(file, length=64, split="100,0,0"):
    return {"tokenizer": str(file), "length": length, "start_token": None, "split": split}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_line_is_named_with_its_number(tmp_path, name):
    record, reason, hint = BAD[name]
    file = model_folder(tmp_path / "model", REFUSING)
    source = lines_in(tmp_path / "chats.jsonl", [GOOD, record, GOOD])
    message = refusal(lambda: CORPORA["chats"].open([str(source)], None, tmp_path / "x", options(file), 1), DataError)
    assert (
        "1 of 3 records are damaged, the first is record 2 here: " in message and reason in message and hint in message
    )
    assert "\n" not in message


def test_a_model_without_a_template_or_with_one_that_moves_answers_is_named(tmp_path):
    source = lines_in(tmp_path / "chats.jsonl", [{"text": "plain"}, GOOD])
    file = model_folder(tmp_path / "model", None)
    read = lambda file: CORPORA["chats"].open([str(source)], None, tmp_path / "x", options(file), 1)  # noqa: E731
    message = refusal(lambda: read(file), DataError)
    assert "line 2" in message and "lacks a chat template" in message and "add its chat_template.jinja" in message
    file = model_folder(tmp_path / "moving", "{{ messages | length }}" + CHATML)
    assert "renders messages otherwise when others follow" in refusal(lambda: read(file), DataError)
    file = model_folder(tmp_path / "silent", "no conversation")
    assert "the chat template renders no answer" in refusal(lambda: read(file), DataError)
    assert "bytes lacks a chat template" in refusal(lambda: read("bytes"), ConfigError)


def test_a_few_invalid_lines_are_left_out_and_counted(tmp_path, capsys):
    file = model_folder(tmp_path / "model", CHATML)
    records = [*[GOOD] * 150, {"messages": []}, conversation("x" * 80, "y"), conversation("How far?", "z" * 99)]
    source = lines_in(tmp_path / "chats.jsonl", records)
    made = CORPORA["chats"].open([str(source)], None, tmp_path / "x", options(file), 1)
    about = CORPORA["chats"].about(made, options(file))
    assert about["documents"] == {"train": 151} and about["cut"] == 1
    said = capsys.readouterr().err
    assert "151 conversations, of which 1 are cut to 64 tokens; left out: 1 no message of the role assistant" in said
    assert "1 no token of an answer within 64 tokens; the first invalid line is 151" in said
    assert f"; {150 * len(tokens_of(file, GOOD)) + 64:,} tokens in all" in said


def test_packing_keeps_conversations_whole(tmp_path):
    generator = np.random.default_rng(0)
    given = [np.full(size, number, "<u4") for number, size in enumerate(generator.integers(1, 40, 500), 1)]
    given.append(np.full(70, 501, "<u4"))
    rows = [np.frombuffer(record, "<u4") for record in packed(given, 50, 0)]
    assert all(len(row) == 50 for row in rows)
    sizes = np.bincount(np.concatenate(rows), minlength=502)
    assert sizes[1:].tolist() == [min(50, len(tokens)) for tokens in given]
    where = [{int(number) for number in row} for row in rows]
    assert all(a.isdisjoint(b - {0}) for i, a in enumerate(where) for b in where[:i])
    assert all((np.diff(np.flatnonzero(row == number)) == 1).all() for row in rows for number in {*row.tolist()} - {0})
    assert sizes[0] < 0.04 * sizes.sum() and len(rows) > OPEN_RECORDS


def test_shards_are_the_same_after_an_interruption(tmp_path):
    file = model_folder(tmp_path / "model", CHATML)
    source = lines_in(tmp_path / "chats.jsonl", [conversation("a" * i, "b" * (50 - i)) for i in range(1, 50)] * 4)

    def write(output, workers=1):
        settings = options(file, split="50,50,0")
        made = CORPORA["chats"].open([str(source)], None, output / ".download", settings, 1)
        sizes = {"sample_bytes": 1024, "shard_bytes": 4096, "command": "", "workers": workers}
        prepare("chats", made, output, options=settings, **sizes)
        return Index.load(output)

    whole, again = write(tmp_path / "whole", 2), write(tmp_path / "again")
    assert whole.fingerprint == again.fingerprint and whole.record == 64
    for shard in whole.split("train").shards[1:]:
        (tmp_path / "whole" / shard.file).unlink()
    assert write(tmp_path / "whole").fingerprint == again.fingerprint
    assert whole.file.source["document_separator"] == CONVERSATION_END + START
    assert len(list(pairwise(whole.split("train").shards))) > 1
