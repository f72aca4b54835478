"""Our models behind HuggingFace's classes, against our own functions."""

import itertools
import json

import accelerate
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from megasparse.attention.heads import Padding
from megasparse.errors import ConfigError
from megasparse.evaluation.generate import BeamSettings, generate, search
from megasparse.hub.modelling import (
    MegasparseConfig,
    MegasparseForCausalLM,
    MegasparseForMaskedLM,
    MegasparseForSeq2SeqLM,
    MegasparseForSequenceClassification,
    MegasparseModel,
)
from megasparse.hub.replace import replace_attention
from megasparse.layer import AttentionLayer
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext, drawn_step
from tests.helpers.cases import together
from tests.helpers.hub import SEED, assert_trainer_resumes, decoder, encoder, made
from tests.helpers.models import (
    BERT,
    NGRAMS,
    PARTS,
    by_path,
    causal_names,
    encoder_names,
    named,
    random_tokens,
    small_pair,
    strict_names,
)

LENGTH = 40


def wrapped(kind, config, model=None, **settings):
    hf = kind(MegasparseConfig(model=json.loads(config.model_dump_json()), seed=SEED, **settings)).eval()
    hf.model.load_state_dict((model or made(config)).state_dict())
    return hf


@by_path("name", causal_names())
def test_a_decoders_logits_predict_the_token_after_each_position(name):
    config, documents = decoder(name), name in ("full", "lsh", "lsh chunk", "ngram")
    config = config.model_copy(update={"document_separator": 7}) if documents else config
    ours, hf = made(config), wrapped(MegasparseForCausalLM, config)
    tokens = random_tokens(2, LENGTH)
    tokens[0, 5], tokens[:, 20] = 7, 7
    nats = ours.token_scores(tokens, RngContext.evaluation(SEED, 2)).nats
    with torch.no_grad():
        logits = torch.cat([hf(tokens[:, :0]).logits, hf(tokens[:, :-1]).logits], dim=1)
    predicted = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(2, LENGTH)
    first = 1 if ours.leaks else 0  # a later token moves the first one's logits, and an empty input has none
    torch.testing.assert_close(predicted[:, first:], nats[:, first:], atol=1e-5, rtol=0)
    if documents and not ours.leaks:
        with pytest.raises(ValueError, match="several documents, a cache only one"):
            hf(tokens, use_cache=True)


@by_path("name", encoder_names())
def test_an_encoders_logits_predict_the_token_at_each_position(name):
    config = encoder(name)
    ours, hf = made(config), wrapped(MegasparseForMaskedLM, config)
    tokens, rng = random_tokens(2, LENGTH), RngContext.evaluation(SEED, 2)
    hidden, scored = ours.prepare_inputs(tokens, rng, Padding())
    with torch.no_grad():
        labels = tokens.masked_fill(~scored, -100)
        out = hf(hidden, labels=labels)
        shared = hf(hidden, labels=labels, num_items_in_batch=2 * scored.sum()).loss  # one of two accumulated batches
    predicted = F.cross_entropy(out.logits.flatten(0, 1), tokens.flatten(), reduction="none").view(2, LENGTH)
    nats = ours.token_scores(tokens, rng).nats
    torch.testing.assert_close(predicted, nats, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.loss, nats[scored].mean(), atol=1e-5, rtol=0)
    torch.testing.assert_close(2 * shared, out.loss, atol=1e-5, rtol=0)


@by_path("name", strict_names())
def test_cached_greedy_text_is_the_uncached_and_our_own(name):
    config = decoder(name, ngrams=NGRAMS)
    ours, hf = made(config), wrapped(MegasparseForCausalLM, config)
    prompt = random_tokens(1, 21)
    cached = hf.generate(prompt, max_new_tokens=8, use_cache=True)
    uncached = hf.generate(prompt, max_new_tokens=8, use_cache=False)
    own = list(generate(ours, prompt[0], 8, hash_seed=SEED, temperature=0.0))
    assert cached[0].tolist() == uncached[0].tolist() == prompt[0].tolist() + own
    with torch.autocast("cpu", torch.bfloat16):
        assert hf.generate(prompt, max_new_tokens=4, use_cache=True).shape == (1, 25)
    assert hf.double().generate(prompt, max_new_tokens=2, use_cache=True).shape == (1, 23)


def test_text_is_generated_from_nothing():
    config = decoder("local")
    hf = wrapped(MegasparseForCausalLM, config)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    own = list(generate(made(config), nothing[0], 6, hash_seed=SEED, temperature=0.0))
    for use_cache in (True, False):
        assert hf.generate(nothing, max_new_tokens=6, use_cache=use_cache).tolist() == [own, own]


def assert_offloaded_is_whole(config):
    hf, tokens = wrapped(MegasparseForCausalLM, config), random_tokens(2, 21)

    def outputs():
        cached = [] if hf.model.leaks else [hf.generate(tokens, max_new_tokens=3, use_cache=True)]
        with torch.no_grad():
            return [hf(tokens).logits, *cached, hf(tokens[:, :9]).logits]

    expected = [hf(tokens).logits, *outputs()]  # with and without a graph
    accelerate.cpu_offload(hf, "cpu")
    assert all(weight.is_meta for weight in hf.parameters())
    for found, value in zip([hf(tokens).logits, *outputs()], expected, strict=True):
        assert found.equal(value)


RECOMPUTED = {"blocks": "ordinary", "activations": "checkpoint"}


@together("name, changes", [
    ("lsh", {"ngrams": NGRAMS}), ("lha", PARTS), ("smart_bird transformer", {"feed_forward_tiles": 3}),
    ("yoso", RECOMPUTED | {"checkpoint_layers": 2}), ("local", RECOMPUTED | {"feed_forward_tiles": 3}),
])  # fmt: skip
def test_offloaded_weights_change_no_bit(name, changes):
    assert_offloaded_is_whole(decoder(name, **changes))
    groups = named(name).model_copy(update={"head_groups": 2})
    if "key_heads" not in changes:
        assert_offloaded_is_whole(decoder(name, **{**changes, "attention": groups}))


@pytest.mark.slow
@together("name", causal_names())
def test_every_mechanism_can_be_offloaded(name):
    assert_offloaded_is_whole(decoder(name))


class OwnModel(torch.nn.Module):
    """A model of a user with a layer of each kind of state: random rotations and centroids."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        self.layers = torch.nn.ModuleList(AttentionLayer(kind, 16, 2, 64, chunk=4) for kind in ("lsh", "routing"))

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def replaced_llama():
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    pattern = {"pattern": ["lsh", "routing"], "lsh": {"chunk": 4}, "routing": {"chunk": 4, "window": "band"}}
    return replace_attention(LlamaForCausalLM(config), pattern)


def with_adapters():
    torch.manual_seed(0)
    targets = LoraConfig(target_modules=["query", "value"], init_lora_weights="gaussian")
    return get_peft_model(wrapped(MegasparseForCausalLM, decoder("lsh")), targets)


@pytest.mark.parametrize("make", [
    pytest.param(lambda: wrapped(MegasparseForCausalLM, decoder("lsh", dropout=0.1)), id="export"),
    *(pytest.param(make, marks=pytest.mark.slow) for make in (with_adapters, replaced_llama, OwnModel)),
])  # fmt: skip
def test_a_resumed_trainer_repeats_the_run_bit_for_bit(make, tmp_path):
    rows = random_tokens(16, 32) % 256
    assert_trainer_resumes(make, [{"input_ids": row, "labels": row} for row in rows], tmp_path)


@together("kind", [MegasparseForCausalLM, MegasparseModel])
def test_positions_of_packed_documents_are_an_error(kind):
    hf, tokens = wrapped(kind, decoder("lsh")), random_tokens(2, 30)
    positions = torch.arange(30).expand(2, -1)
    assert hf(tokens)[0].equal(hf(tokens, position_ids=positions)[0])  # as `generate` passes them
    for other in (positions % 17, positions + 1, positions.clamp_min(1) - 1):
        with pytest.raises(ValueError, match="position_ids restart or start late"):
            hf(tokens, position_ids=other)
    mask = F.pad(torch.ones(2, 27), (3, 0))  # transformers' positions of left padding, whose value is free
    padded = [hf(tokens, mask, position_ids=F.pad(positions[:, :27], (3, 0), value=value))[0] for value in (0, 1)]
    assert padded[0].equal(padded[1]) and padded[0][:, 3:].equal(hf(tokens, mask)[0][:, 3:])


@together("name", ["past_key_values", "cache"])  # before and since transformers 5.24
def test_a_cache_takes_several_more_tokens(name):
    hf, tokens = wrapped(MegasparseForCausalLM, decoder("lsh")), random_tokens(2, 30)
    first = hf(tokens[:, :20], use_cache=True)  # with gradients enabled
    with torch.no_grad():
        cache = {name: first.past_key_values}
        assert hf.prepare_inputs_for_generation(tokens, **cache)["input_ids"].equal(tokens[:, 20:])
        later = hf(tokens[:, 20:], **cache)
        both = torch.cat([first.logits, later.logits], dim=1)
        torch.testing.assert_close(both, hf(tokens).logits, atol=1e-5, rtol=0)
    assert later.past_key_values.get_seq_length() == 30
    with pytest.raises(ValueError, match="cannot draft"):
        later.past_key_values.crop(20)


@together("kind", [MegasparseForCausalLM, MegasparseForSeq2SeqLM])
def test_a_mask_that_does_not_fit_the_tokens_or_the_cache_is_an_error(kind):
    hf, tokens = wrapped(kind, MODELS[kind]), random_tokens(2, 9)
    name, given = "attention_mask", {"input_ids": tokens}
    if kind is MegasparseForSeq2SeqLM:
        start = F.pad(tokens, (1, -1), value=hf.config.decoder_start_token_id)
        name, given = f"decoder_{name}", {"encoder_outputs": hf.get_encoder()(tokens), "decoder_input_ids": start}
    for shape in ((2, 8), (2, 10), (1, 9), (2, 1, 1, 9)):
        with pytest.raises(ValueError, match=f"{name} has shape .*expected .2, 9.: .batch, length. of the tokens"):
            hf(**given, **{name: torch.ones(shape)})
    ones = torch.ones(2, 12)
    later = {"decoder_input_ids" if "decoder_input_ids" in given else "input_ids": tokens[:, :3]}
    expected = None
    for mask in (None, ones[:, :3], ones, ones[:, :11], ones.index_fill(1, torch.tensor(10), 0), ones[:, :3] * 0,
                 ones.index_fill(1, torch.tensor(2), 0)):  # fmt: skip
        cache = hf(**given, use_cache=True).past_key_values
        if mask is None or (mask.shape[1] != 11 and bool(mask.all())):
            logits = hf(**later, past_key_values=cache, **{name: mask}).logits
            assert expected is None or logits.equal(expected)
            expected = logits
            continue
        message = "has shape" if mask.shape[1] == 11 else "a cache cannot contain padding"
        with pytest.raises(ValueError, match=f"{name}:? {message}"):
            hf(**later, past_key_values=cache, **{name: mask})


@pytest.mark.parametrize("name", ["full", "lsh", "yoso", "smart_bird", pytest.param("lha", marks=pytest.mark.slow)])
def test_beams_with_and_without_a_cache(name):
    """Prompts of several lengths, whose rows have caches of their own; hypotheses change rows."""
    config = decoder(name, vocabulary=7, ngrams=NGRAMS)
    hf = wrapped(MegasparseForCausalLM, config)
    prompts = [random_tokens(1, length, 7, seed=length) for length in (20, 7, 20)]
    batch = torch.cat([F.pad(prompt, (20 - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([F.pad(torch.ones_like(prompt), (20 - prompt.shape[1], 0)) for prompt in prompts])
    settings = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 8, "num_return_sequences": 2}
    found = hf.generate(batch, **settings, return_dict_in_generate=True, output_logits=True)
    cached, before = found.sequences, found.beam_indices
    assert (before[:, 1:] != before[:, :-1]).any(), "hypotheses that stay in their rows need no cache to change"
    assert torch.equal(cached, hf.generate(batch, **settings, use_cache=False))
    rule = BeamSettings(beams=3, tokens=8)
    for row, prompt in enumerate(prompts):
        own = search(made(config), prompt, SEED, rule)[0]
        assert cached[2 * row : 2 * row + 2, 20:].tolist() == [each.tokens for each in own[:2]]


def test_in_bf16_branches_compute_in_bf16(tmp_path):
    hf = wrapped(MegasparseForCausalLM, decoder("lsh"))
    hf.save_pretrained(tmp_path)
    half = MegasparseForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    tokens = random_tokens(1, 9)
    cached = half.generate(tokens, max_new_tokens=4)
    assert cached.shape == (1, 13)
    with torch.no_grad():
        logits = half(tokens).logits
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, hf(tokens).logits, atol=0.2, rtol=0)


@pytest.mark.parametrize("name", ["full", "lsh", "yoso", "smart_bird", "lsh chunk"])
def test_padding_of_a_decoder_on_either_side_changes_nothing(name):
    hf = wrapped(MegasparseForCausalLM, decoder(name, ngrams=NGRAMS))
    long, short = random_tokens(1, LENGTH, seed=1), random_tokens(1, 23, seed=2)
    for pad in ((LENGTH - 23, 0), (0, LENGTH - 23)):
        batch = torch.cat([long, F.pad(short, pad, value=300)])
        mask = torch.cat([torch.ones_like(long), F.pad(torch.ones_like(short), pad)])
        with torch.no_grad():
            logits = hf(batch, attention_mask=mask).logits
            torch.testing.assert_close(logits[0], hf(long).logits[0], atol=2e-5, rtol=0)
            torch.testing.assert_close(logits[1, mask[1].bool()], hf(short).logits[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["full", "linformer", "smyrf", "yoso"])
def test_padding_of_an_encoder_on_either_side_changes_nothing(name):
    config, tokens = encoder(name, ngrams=NGRAMS), random_tokens(1, 23)
    kinds = (MegasparseForMaskedLM, MegasparseModel, MegasparseForSequenceClassification)
    for kind, pad in itertools.product(kinds, [(17, 0), (0, 17)]):
        padded, mask = F.pad(tokens, pad, value=300), F.pad(torch.ones_like(tokens), pad)
        real = mask[0].bool()
        hf = wrapped(kind, config)
        with torch.no_grad():
            alone, out = hf(tokens)[0], hf(padded, attention_mask=mask)[0]
        torch.testing.assert_close(out[:, real] if out.dim() == 3 else out, alone, atol=2e-5, rtol=0)


def test_a_classifier_reads_the_mean_of_an_encoder_and_the_end_of_a_decoder():
    tokens = random_tokens(2, 12)
    for config in (encoder("full"), decoder("full")):
        hf = wrapped(MegasparseForSequenceClassification, config, num_labels=3)
        bare = wrapped(MegasparseModel, config)
        with torch.no_grad():
            normalised = F.layer_norm(bare(tokens).last_hidden_state, (64,))
            pooled = normalised.mean(1) if config.kind == "encoder" else normalised[:, -1]
            out = hf(tokens, labels=torch.tensor([2, 0]))
            torch.testing.assert_close(out.logits, hf.classifier(pooled), atol=1e-5, rtol=0)
            torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, torch.tensor([2, 0])))


def test_the_loss_equals_megasparse_except_for_the_first_token():
    config = decoder("lsh", dropout=0.1)
    ours, hf = made(config), wrapped(MegasparseForCausalLM, config)
    tokens = random_tokens(2, LENGTH)
    nats = ours.token_scores(tokens, RngContext.evaluation(SEED, 2)).nats
    labels = tokens.clone()
    labels[0, 10:20] = -100
    counted = labels[:, 1:] != -100
    loss = hf(tokens, labels=labels).loss
    torch.testing.assert_close(loss, nats[:, 1:][counted].mean(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["lha", "smart_bird", "routing"])
def test_training_minimises_our_own_objective(name):
    """Our score_from of 1 leaves out the first token, as HuggingFace does."""
    config = decoder(name, dropout=0.1, score_from=1)
    ours, hf = made(config).train(), wrapped(MegasparseForCausalLM, config).train()
    tokens = random_tokens(2, LENGTH)
    padded = torch.cat([tokens, random_tokens(2, 1)], dim=1)  # n inputs are n + 1 positions, the last predicts nothing
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[:, -1] = False
    torch.manual_seed(5)
    objective, _ = ours(padded, RngContext(SEED, drawn_step(), torch.arange(2), training=True), Padding(mask))
    torch.manual_seed(5)
    loss = hf(tokens, labels=tokens).loss
    if name != "lha":  # its hash learns from the keys that a mask leaves, and the last position is one here
        torch.testing.assert_close(loss, objective, atol=1e-5, rtol=0)
    other = hf(tokens, labels=tokens).loss
    assert other != loss  # the next pass draws anew
    loss.backward()
    trained = [name for name, parameter in hf.named_parameters() if parameter.grad is not None]
    assert len(trained) == len(list(hf.parameters()))


def test_missing_weights_are_initialised_and_the_rest_is_read(tmp_path):
    config = decoder("routing")
    hf = wrapped(MegasparseForCausalLM, config)
    hf.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = "model.blocks.1.feed_forward.feed_forward.up"
    present = {name: x for name, x in tensors.items() if name != missing}
    save_file(present, tmp_path / "model.safetensors", {"format": "pt"})
    again, initial = MegasparseForCausalLM.from_pretrained(tmp_path), build_model(config, SEED).state_dict()
    assert any("centroids" in name for name in tensors)
    for name, value in tensors.items():
        expected = initial[name.removeprefix("model.")] if name == missing else value
        assert torch.equal(again.state_dict()[name], expected), name


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
def test_a_missing_tied_embedding_is_reported(kind, tmp_path):
    config = decoder("local").model_copy(update={"tied_embeddings": True}) if kind == "decoder" else small_pair()
    hf = wrapped(MegasparseForCausalLM if kind == "decoder" else MegasparseForSeq2SeqLM, config)
    hf.save_pretrained(tmp_path)
    for missing in (set(), {"model.embedding.weight"}):
        weights = load_file(tmp_path / "model.safetensors")
        save_file(
            {n: w for n, w in weights.items() if n not in missing}, tmp_path / "model.safetensors", {"format": "pt"}
        )
        _, info = type(hf).from_pretrained(tmp_path, output_loading_info=True)
        assert missing <= info["missing_keys"] and bool(missing) == bool(info["missing_keys"])


RESIZED = {
    MegasparseForCausalLM: decoder("local", output_bias=True),
    MegasparseForMaskedLM: encoder("full", **BERT),
    MegasparseForSeq2SeqLM: small_pair(("local",)),
}


@together("kind", RESIZED)
def test_resized_embeddings_keep_the_old_tokens(kind, tmp_path):
    hf, pair = wrapped(kind, RESIZED[kind]), kind is MegasparseForSeq2SeqLM
    vocabulary, tokens = hf.config.vocab_size, random_tokens(2, 9)

    def logits(hf, tokens):
        return hf(tokens, **({"decoder_input_ids": F.pad(tokens, (1, 0), value=258)} if pair else {})).logits

    before = logits(hf, tokens)
    embedding = hf.resize_token_embeddings(vocabulary + 1, pad_to_multiple_of=16)
    rows = (vocabulary // 16 + 1) * 16
    assert embedding is hf.get_input_embeddings() and len(embedding.weight) == hf.config.vocab_size == rows
    torch.testing.assert_close(logits(hf, tokens)[..., :vocabulary], before)
    hf.save_pretrained(tmp_path)
    tokens[:, 3] = rows - 1
    assert torch.equal(logits(kind.from_pretrained(tmp_path), tokens), logits(hf, tokens))
    hf.resize_token_embeddings(vocabulary)
    tokens[:, 3] = 3
    torch.testing.assert_close(logits(hf, tokens), logits(wrapped(kind, RESIZED[kind]), tokens))
    if pair:
        with pytest.raises(ConfigError, match=r"model\.padding_token: 258 is outside model\.vocabulary"):
            hf.resize_token_embeddings(200)


def test_bad_inputs_are_rejected_in_one_line():
    hf = wrapped(MegasparseForCausalLM, decoder("local"))
    with pytest.raises(ValueError, match="128 tokens are more than the model's maximum of 127"):
        hf(random_tokens(1, 128))
    with pytest.raises(ValueError, match="only padding"):
        hf(random_tokens(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        MegasparseForMaskedLM(hf.config)
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        wrapped(MegasparseForCausalLM, encoder("full"))
    longest = hf.generate(random_tokens(1, 126), max_new_tokens=2)
    assert longest.shape == (1, 128)
    with pytest.raises(ValueError, match="128 tokens are more"):
        hf.generate(random_tokens(1, 126), max_new_tokens=3)
    leaking = wrapped(MegasparseForCausalLM, decoder("lsh chunk"))
    with pytest.raises(ValueError, match="not strictly causal"):
        leaking.generate(random_tokens(1, 9), max_new_tokens=2)
    assert leaking.generate(random_tokens(1, 9), max_new_tokens=2, use_cache=False).shape == (1, 11)


VECTORS, BLOCKS = torch.zeros(2, 4, 32), torch.ones(2, 1, 9, 9)
UNSUPPORTED = {
    "inputs_embeds": VECTORS,
    "decoder_inputs_embeds": VECTORS,
    "output_hidden_states": True,
    "output_attentions": True,
    "attention_mask": BLOCKS,
    "past_key_values": DynamicCache(),
}
MODELS = {
    MegasparseForCausalLM: decoder("local"),
    MegasparseForMaskedLM: encoder("full"),
    MegasparseForSeq2SeqLM: small_pair(("local",)),
    MegasparseModel: decoder("local"),
}


@together("kind", MODELS)
def test_unsupported_arguments_are_errors_that_name_them(kind):
    hf, tokens = wrapped(kind, MODELS[kind]), random_tokens(2, 9)
    pair = {}
    if hf.config.is_encoder_decoder:
        pair = {"decoder_input_ids": torch.full((2, 3), hf.config.decoder_start_token_id)}
        for use in (hf, hf.generate):
            with pytest.raises(ValueError, match="decoder_attention_mask has shape"):
                use(tokens, decoder_attention_mask=BLOCKS, **pair)
        with pytest.raises(ValueError, match="decoder_attention_mask: a cache cannot contain padding"):
            hf(tokens, decoder_attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]), use_cache=True, **pair)
    for name, value in UNSUPPORTED.items():
        given = {name: value} if value is VECTORS else {name: value, "input_ids": tokens}
        with pytest.raises(ValueError, match=name):
            hf(**given, **pair)
        if hf.can_generate():
            with pytest.raises(ValueError, match=f"{name}|cache"):
                hf.generate(**given, max_new_tokens=2)
    for name in ("output_hidden_states", "output_attentions"):
        setattr(hf.config, name, True)
        with pytest.raises(ValueError, match=name):
            hf(tokens, **pair)
        setattr(hf.config, name, False)
    assert hf.get_input_embeddings().weight.shape == (hf.config.vocab_size, hf.config.hidden_size)
    for change in (hf.set_input_embeddings, hf.set_output_embeddings):
        with pytest.raises(NotImplementedError, match=change.__name__):
            change(torch.nn.Embedding(9, 32))


@together("method", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
@together("task", ["CAUSAL_LM", "SEQ_CLS"])
def test_tuning_of_prompts_is_an_error(method, task):
    peft, tokens = pytest.importorskip("peft"), random_tokens(2, 9)
    sizes = {"num_virtual_tokens": 4, "token_dim": 32, "num_layers": 2, "num_attention_heads": 2}
    kind = MegasparseForCausalLM if task == "CAUSAL_LM" else MegasparseForSequenceClassification
    tuned = peft.get_peft_model(wrapped(kind, decoder("local")), getattr(peft, method)(task_type=task, **sizes))
    generate = [lambda **given: tuned.generate(**given, max_new_tokens=2)] if task == "CAUSAL_LM" else []
    for use in (tuned, *generate):
        with pytest.raises(ValueError, match=r"inputs_embeds is not supported|past_key_values is a DynamicCache"):
            use(input_ids=tokens, attention_mask=torch.ones_like(tokens))


@pytest.mark.parametrize(
    "kind,blocks",
    list(zip([*list(MODELS)[:3], MegasparseForSequenceClassification], ["reversible", "ordinary"] * 2, strict=True)),
)
def test_adapters_on_all_linear_layers_learn_with_recomputed_activations(kind, blocks):
    peft, tokens, gradients = pytest.importorskip("peft"), random_tokens(2, 30), []
    labels = torch.tensor([0, 1]) if kind is MegasparseForSequenceClassification else tokens
    config = {**MODELS, MegasparseForSequenceClassification: encoder("full")}[kind]
    for recomputed in (False, True):
        settings = {"blocks": blocks, "activations": "stored"}
        if recomputed and blocks == "reversible":
            settings["activations"] = "reversible"
        torch.manual_seed(0)
        hf = wrapped(kind, config.model_copy(update=settings)).train()
        if recomputed and blocks == "ordinary":
            hf.gradient_checkpointing_enable()
        tuned = peft.get_peft_model(hf, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
        tuned(input_ids=tokens, labels=labels).loss.backward()
        gradients.append({name: x.grad for name, x in tuned.named_parameters() if x.requires_grad})
    assert len(gradients[0]) > 8 and all(x.abs().sum() > 0 for x in gradients[0].values())
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_is_decoder_can_be_set_only_as_the_model_is():
    config = MegasparseConfig(model=json.loads(decoder("full").model_dump_json()), is_decoder=True)
    assert config.is_decoder
    with pytest.raises(ValueError, match="is_decoder cannot be False: the model is of kind decoder"):
        config.is_decoder = False
