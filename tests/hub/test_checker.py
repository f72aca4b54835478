"""The checker on models that are right, and on models with the faults that published ones had."""

import functools

import pytest
import torch
import transformers

from megasparse.attention.heads import Padding
from megasparse.cli.main import main
from megasparse.errors import HubError
from megasparse.files import CONVERSATION_END, UNSCORED
from megasparse.hub.checker import CHECKS, check_batch, check_model, load_model
from megasparse.hub.replace import replace_attention
from megasparse.model.build import build_model
from tests.helpers.commands import refused
from tests.helpers.models import small

LSH = {"kind": "lsh", "chunk": 16, "rounds": 2}
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(kind=transformers.LlamaForCausalLM):
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**SIZES))


def of(name, config, **changes):
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**SIZES, **changes))


RIGHT = {
    "grouped heads": llama,
    "fp64": lambda: llama().double(),
    "sliding window": lambda: of("MistralForCausalLM", "MistralConfig", sliding_window=16),
    "normed queries and keys": lambda: of("Qwen3ForCausalLM", "Qwen3Config", head_dim=8),
    "learned positions": lambda: of("GPT2LMHeadModel", "GPT2Config"),
    "parallel branches": lambda: of("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "windows in some layers": lambda: of("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=16),
    "replaced attention": lambda: replace_attention(llama(), LSH, max_length=128),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_passes_every_check(name):
    results = check_model(RIGHT[name]())
    assert [result.name for result in results] == [*CHECKS] and all(result.passed for result in results), results
    assert max(result.difference for result in results) < 1e-5


def cache_among(inputs):
    return next((x for x in inputs.values() if isinstance(x, transformers.Cache)), None)


class IgnoresDocuments(transformers.LlamaForCausalLM):
    """Positions restart, and no mask separates the documents."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids, attention_mask=None, **inputs):
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if cache_among(inputs) is not None:
            attention_mask = None
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **inputs)


class InvertsPadding(transformers.LlamaForCausalLM):
    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids, attention_mask=None, **inputs):
        attention_mask = None if attention_mask is None or attention_mask.all() else 1 - attention_mask
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **inputs)


class MovesCachedPositions(transformers.LlamaForCausalLM):
    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids, **inputs):
        if (cache := cache_among(inputs)) is not None:
            inputs["position_ids"] = torch.full_like(input_ids, cache.get_seq_length() - 1)
        return super().forward(input_ids=input_ids, **inputs)


class SeesItsBatch(transformers.LlamaForCausalLM):
    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids, **inputs):
        out = super().forward(input_ids=input_ids, **inputs)
        out.logits = out.logits + 1e-2 * out.logits.mean(0, keepdim=True)
        return out


def sorted_chunks():
    """Later tokens move the borders of the chunks of Hugging Face's Reformer."""
    return of(
        "ReformerModelWithLMHead", "ReformerConfig", attention_head_size=8, feed_forward_size=64, num_buckets=8,
        attn_layers=["lsh", "lsh"], is_decoder=True, lsh_attn_chunk_length=16, axial_pos_embds=False, hash_seed=0,
    )  # fmt: skip


FAULTY = {
    "sorted chunks": (sorted_chunks, {"later tokens"}),
    "positions without a mask": (lambda: llama(IgnoresDocuments), {"packed documents"}),
    "inverted mask": (lambda: llama(InvertsPadding), {"padding on the right", "padding on the left"}),
    "cached positions": (lambda: llama(MovesCachedPositions), {"decoding from a cache"}),
    "statistics of the batch": (lambda: llama(SeesItsBatch), {"other rows of a batch"}),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_model_fails_the_check_of_its_fault(name):
    build, faults = FAULTY[name]
    results = {result.name: result for result in check_model(build())}
    assert faults <= {key for key, result in results.items() if result.passed is False}, results
    for fault in faults:
        assert results[fault].difference > 1e-3 and results[fault].position is not None
    cached = results["decoding from a cache"]
    if name == "sorted chunks":
        assert cached.passed is None  # it has no cache
    if name == "cached positions":
        assert cached.position == 32  # half of the row is read at once


def test_a_model_that_crashes_fails_and_one_that_rejects_packed_documents_does_not():
    model = replace_attention(of("GptOssForCausalLM", "GptOssConfig", head_dim=8, num_local_experts=4), LSH)
    assert [result.passed for result in check_model(model, 24)] == [True] * 5 + [None]
    with pytest.raises(HubError, match=r"GPT2LMHeadModel: cannot process 300 tokens .*index out of range"):
        check_model(RIGHT["learned positions"](), 300)
    model = llama()
    model.model.layers[1].register_forward_hook(lambda layer, inputs, out: out.view(-1, 64, 32))
    results = {result.name: result for result in check_model(model)}
    cached = results["decoding from a cache"]
    assert results["later tokens"].passed and cached.passed is False and cached.note.startswith("shape '[-1, 64, 32]'")


def test_the_command_prints_a_table_and_ends_with_an_error_after_a_failure(tmp_path, capsys):
    llama().bfloat16().save_pretrained(tmp_path / "right")
    assert load_model(tmp_path / "right").dtype == torch.float32
    main(["check-model", "--model", str(tmp_path / "right")])
    assert capsys.readouterr().out.count("PASS") == len(CHECKS)
    words = ["replace-attention", "--attention", '{"kind": "lsh"}', "--output", tmp_path / "replaced", "--model"]
    assert "right: its tokenizer cannot be loaded" in refused(capsys, main, *words, tmp_path / "right")
    sorted_chunks().save_pretrained(tmp_path / "leaks")
    error = refused(capsys, main, "check-model", "--model", tmp_path / "leaks")
    assert "leaks: fails 4 of 6 checks: later tokens, padding" in error
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / "bert")
    error = refused(capsys, main, "check-model", "--model", tmp_path / "bert")
    assert "architecture BertModel. Give a causal" in error


@pytest.mark.parametrize("fault", [None, "packed documents", "later tokens"])
def test_a_batch_of_a_run_is_checked_for_other_documents_and_later_tokens(fault):
    """Of four conversations; the faults are a lost mask, and a sum over the row."""
    model = build_model(small(("local",), document_separator=CONVERSATION_END + 5), 3).eval()
    tokens = torch.randint(6, 250, (2, 48), generator=torch.Generator().manual_seed(0))
    tokens[:, ::3] += UNSCORED
    tokens[:, [9, 20, 40]] = CONVERSATION_END + 5
    whole = model.token_scores

    def faulty(read, rng):
        scores = whole(read, rng, Padding() if fault == "packed documents" else None)
        if fault == "later tokens":
            scores = scores._replace(nats=scores.nats + read.sum(1, keepdim=True) % 7)
        return scores

    model.token_scores = faulty
    assert check_batch(model, tokens[:, :9])[1].passed is None
    results = check_batch(model, tokens)
    assert [result.name for result in results] == ["later tokens", "packed documents"]
    assert [result.name for result in results if not result.passed] == {
        None: [], "packed documents": ["packed documents"], "later tokens": ["later tokens", "packed documents"]
    }[fault]  # fmt: skip
