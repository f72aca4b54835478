"""Our encoder–decoders behind HuggingFace's class, against our own functions. S tokens of a source."""

import pytest
import torch
import torch.nn.functional as F

from megasparse.evaluation.generate import BeamSettings, generate, search
from megasparse.evaluation.texts import EncodedSource
from megasparse.hub.modelling import (
    MegasparseForCausalLM,
    MegasparseForSeq2SeqLM,
    MegasparseForSequenceClassification,
    MegasparseModel,
)
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext, drawn_step
from tests.helpers.hub import SEED, decoder, made
from tests.helpers.models import NGRAMS, attention, padded_pairs, random_tokens, small_pair
from tests.hub.test_modelling import wrapped

S, PADDING = 40, 258
LHA = attention("lha", "full", lha={"utility": "sampled"})
"""Has auxiliary losses."""
SKETCH = attention("smart_bird", smart_bird={"keys": 6, "objective": "answer"})
CONFIGS = {
    "reversible": small_pair(),
    "apart": small_pair(tied_embeddings=True, source={"shared_embedding": False}, ngrams=NGRAMS),
    "ordinary": small_pair(blocks="ordinary", activations="checkpoint", tied_embeddings=True),
    "others": small_pair(("lha", "yoso", "smart_bird"), source={"attention": attention("smyrf", "linformer")}),
    "sketches": small_pair(("smart_bird",), source={"attention": SKETCH}),
    "learned": small_pair(attention=LHA, source={"attention": LHA}),
    "leaking": small_pair(("local", "lsh"), attention=attention("local", "lsh", lsh={"window": "chunk"})),
}


def model_of(name, **changes):
    config = CONFIGS[name].model_copy(update=changes)
    return made(config), wrapped(MegasparseForSeq2SeqLM, config)


def sources(*lengths, vocabulary=256):
    """Each sequence by itself, (1, length), and all of them, padded right, (n, S)."""
    each = [random_tokens(1, length, vocabulary, seed=length) for length in lengths]
    return each, torch.cat([F.pad(one, (0, max(lengths) - one.shape[1]), value=PADDING) for one in each])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_loss_equal_megasparse(name):
    ours, hf = model_of(name)
    tokens = padded_pairs(3, 60)
    tokens[2, -30:] = PADDING
    scores = ours.token_scores(tokens, RngContext.evaluation(SEED, 3))
    source, target = tokens.split([S, 60], dim=1)
    mask = (source != PADDING).long()
    with torch.no_grad():
        out = hf(source, labels=target)
        ignored = hf(source, attention_mask=mask, labels=target.masked_fill(target == PADDING, -100))
        read = torch.cat([torch.full((3, 1), PADDING), target[:, :-1]], dim=1)
        unlabelled = hf(source, decoder_input_ids=read, decoder_attention_mask=target != PADDING)
    nats = F.cross_entropy(out.logits.transpose(1, 2), target, reduction="none")
    predicted = target != PADDING
    torch.testing.assert_close(nats[predicted], scores.nats[:, S:][predicted], atol=1e-5, rtol=0)
    torch.testing.assert_close(out.loss, scores.nats[scores.scored].mean(), atol=1e-5, rtol=0)
    for other in (ignored, unlabelled):
        torch.testing.assert_close(other.logits[predicted], out.logits[predicted], atol=1e-5, rtol=0)
    torch.testing.assert_close(ignored.loss, out.loss, atol=1e-6, rtol=0)
    halved = hf(source, labels=target, num_items_in_batch=2 * predicted.sum()).loss
    torch.testing.assert_close(2 * halved, out.loss, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["reversible", "learned", "sketches"])
def test_training_minimises_our_own_objective(name):
    ours, hf = (model.train() for model in model_of(name, dropout=0.1, label_smoothing=0.2))
    tokens = padded_pairs(3, 30)
    source, target = tokens.split([S, 30], dim=1)
    torch.manual_seed(5)
    objective, _ = ours(tokens, RngContext(SEED, drawn_step(), torch.arange(3), training=True))
    torch.manual_seed(5)
    loss = hf(source, labels=target).loss
    torch.testing.assert_close(loss, objective, atol=1e-5, rtol=0)
    assert hf(source, labels=target).loss != loss  # the next pass draws anew
    loss.backward()
    assert all(parameter.grad is not None for parameter in hf.parameters())


@pytest.mark.parametrize("name", ["reversible", "others"])
def test_padding_of_a_source_on_either_side_changes_nothing(name):
    _, hf = model_of(name)
    alone, target = random_tokens(1, 23), random_tokens(1, 12, seed=1)
    with torch.no_grad():
        expected = hf(alone, labels=target)
        for side in ((17, 0), (0, 17), (9, 8)):
            padded, mask = F.pad(alone, side, value=300), F.pad(torch.ones_like(alone), side)
            found = hf(padded, attention_mask=mask, labels=target)
            torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=0)
            states = found.encoder_last_hidden_state[mask.bool()]
            torch.testing.assert_close(states, expected.encoder_last_hidden_state[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["reversible", "ordinary", "others"])
def test_cached_greedy_text_is_the_uncached_and_our_own(name):
    ours, hf = model_of(name)
    each, batch = sources(S, 7, 23)
    mask = (batch != PADDING).long()
    cached = hf.generate(batch, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(cached, hf.generate(batch, attention_mask=mask, max_new_tokens=8, use_cache=False))
    assert torch.equal(cached, hf.generate(batch, max_new_tokens=8))  # the padding token gives the mask
    assert cached[:, 0].tolist() == [PADDING] * 3
    for source, row in zip(each, cached[:, 1:].tolist(), strict=True):
        own = generate(EncodedSource(ours, source, SEED), source[0, :0], 8, hash_seed=SEED, temperature=0.0)
        assert row == list(own)


@pytest.mark.parametrize("name, seed, end", [("reversible", 0, 2), ("others", 10, 2)])
def test_beams_equal_megasparse_if_hypotheses_end_in_time(name, seed, end):
    """HuggingFace's length_penalty=0 and early_stopping=True are our rule with alpha 0. Other penalties differ:
    HuggingFace divides by length**alpha, we by ((5 + length)/6)**alpha; and at the longest length HuggingFace takes
    what is cut off for a hypothesis that has ended."""
    ours, hf = model_of(name, vocabulary=8, padding_token=7)
    batch = torch.full((3, S), 7)
    for row, length in enumerate((S, 7, 23)):
        batch[row, :length] = random_tokens(1, length, 7, seed=seed + row)
    settings = {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True, "max_new_tokens": 40}
    settings |= {"eos_token_id": end, "pad_token_id": 7}
    settings |= {"return_dict_in_generate": True, "output_scores": True}
    cached, uncached = (hf.generate(batch, **settings, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    rule, nothing = BeamSettings(beams=3, tokens=40, ends={end}), torch.empty(3, 0, dtype=torch.long)
    found = search(EncodedSource(ours, batch, SEED), nothing, SEED, rule)
    for (best, *_), row, score in zip(found, cached.sequences.tolist(), cached.sequences_scores.tolist(), strict=True):
        assert best.ended
        assert row[1 : len(best.tokens) + 2] == [*best.tokens, end] and set(row[len(best.tokens) + 2 :]) <= {7}
        assert score == pytest.approx(best.score, abs=1e-4)
    assert len({len(best.tokens) for best, *_ in found}) > 1


def test_encoder_outputs_are_reused():
    _, hf = model_of("reversible")
    _, batch = sources(S, 7, 23)
    target, calls = random_tokens(3, 9), []
    hf.model.encoder.register_forward_hook(lambda *args: calls.append(1))
    read = hf.get_encoder()(batch)
    assert read.last_hidden_state.shape == (3, S, 32) and (read.attention_mask == (batch != PADDING)).all()
    with torch.no_grad():
        again = hf(encoder_outputs=read, labels=target)
        mask = batch != PADDING
        bare = hf(encoder_outputs=(read.last_hidden_state,), attention_mask=mask, labels=target)
        text = hf.generate(encoder_outputs=read, max_new_tokens=5)
        beams = hf.generate(encoder_outputs=hf.get_encoder()(batch), num_beams=2, max_new_tokens=5)
        assert len(calls) == 2
        for found in (again, bare):
            torch.testing.assert_close(found.loss, hf(batch, labels=target).loss, atol=1e-6, rtol=0)
    assert torch.equal(text, hf.generate(batch, max_new_tokens=5))
    assert torch.equal(beams, hf.generate(batch, num_beams=2, max_new_tokens=5))


def test_a_started_target_is_continued():
    ours, hf = model_of("reversible")
    source, prompt = random_tokens(1, 23), random_tokens(1, 6, seed=1)
    own = list(generate(EncodedSource(ours, source, SEED), prompt[0], 8, hash_seed=SEED, temperature=0.0))
    for use_cache in (True, False):
        found = hf.generate(source, decoder_input_ids=prompt, max_new_tokens=8, use_cache=use_cache)
        assert found.tolist() == [[PADDING, *prompt[0].tolist(), *own]]
    begun = torch.tensor([[PADDING, *prompt[0].tolist()]])
    with torch.no_grad():
        first = hf(source, decoder_input_ids=begun, use_cache=True)
        later = hf(decoder_input_ids=torch.tensor([own]), cache=first.past_key_values)  # since transformers 5.24
        whole = hf(source, decoder_input_ids=torch.cat([begun, torch.tensor([own])], dim=1))
    together = torch.cat([first.logits, later.logits], dim=1)
    torch.testing.assert_close(together, whole.logits, atol=1e-5, rtol=0)
    assert later.past_key_values.get_seq_length() == 15


def test_ignored_labels_at_the_start():
    ours, hf = model_of("reversible")
    tokens = padded_pairs(2, 30)
    nats = ours.token_scores(tokens, RngContext.evaluation(SEED, 2)).nats[:, S + 10 :]
    source, target = tokens.split([S, 30], dim=1)
    labels = target.clone()
    labels[:, :10] = -100
    read = hf.prepare_decoder_input_ids_from_labels(target)
    loss = hf(source, decoder_input_ids=read, labels=labels).loss
    torch.testing.assert_close(loss, nats[target[:, 10:] != PADDING].mean(), atol=1e-5, rtol=0)
    shifted = hf.prepare_decoder_input_ids_from_labels(labels)
    assert shifted[:, :11].eq(PADDING).all() and torch.equal(shifted[:, 11:], read[:, 11:])


@pytest.mark.parametrize("name", ["reversible", "apart", "ordinary"])
def test_tied_weights_stay_tied_and_new_ones_equal_megasparse(name, tmp_path):
    ours, hf = model_of(name)
    hf.save_pretrained(tmp_path)
    again = MegasparseForSeq2SeqLM.from_pretrained(tmp_path)
    assert (again.model.head.weight is again.model.embedding.weight) == ours.config.tied_embeddings
    shared = again.model.encoder.embedding.weight is again.model.embedding.weight
    assert shared == ours.config.source.shared_embedding
    assert all(torch.equal(again.model.state_dict()[key], value) for key, value in ours.state_dict().items())
    fresh, initial = MegasparseForSeq2SeqLM(hf.config).model.state_dict(), build_model(ours.config, SEED).state_dict()
    assert all(torch.equal(fresh[key], value) for key, value in initial.items())


def test_bad_inputs_are_rejected_in_one_line():
    _, hf = model_of("reversible")
    source, start = random_tokens(1, S), torch.tensor([[PADDING]])
    longest, left = torch.cat([start, random_tokens(1, 128)], dim=1), torch.tensor([[0, 1, 1]])
    for problem, inputs in (
        ("41 tokens are more than the encoder.s maximum of 40", {"input_ids": random_tokens(1, 41), "labels": source}),
        ("129 tokens are more than the model's maximum of 128", {"input_ids": source, "decoder_input_ids": longest}),
        ("start with the start token 258", {"input_ids": source, "decoder_input_ids": source}),
        ("start with the start token 258", {"input_ids": source, "decoder_input_ids": source[:, :0]}),
        ("needs decoder_input_ids or labels", {"input_ids": source}),
        ("needs input_ids or encoder_outputs", {"labels": source}),
        ("only padding", {"input_ids": torch.full((1, 3), PADDING), "labels": source}),
        ("omit logits_to_keep", {"input_ids": source, "labels": source, "logits_to_keep": 1}),
        ("on the right", {"input_ids": source, "decoder_input_ids": longest[:, :3], "decoder_attention_mask": left}),
    ):
        with pytest.raises(ValueError, match=problem):
            hf(**inputs)
    begun = {"decoder_input_ids": longest[:, :-2]}
    assert hf.generate(source, **begun, max_new_tokens=2).shape == (1, 129)
    with pytest.raises(ValueError, match="129 tokens are more than the model's maximum of 128"):
        hf.generate(source, **begun, max_new_tokens=3)
    _, leaking = model_of("leaking")
    with pytest.raises(ValueError, match="not strictly causal"):
        leaking.generate(source, max_new_tokens=2)
    assert leaking.generate(source, max_new_tokens=2, use_cache=False).shape == (1, 3)
    for kind in (MegasparseForCausalLM, MegasparseModel, MegasparseForSequenceClassification):
        with pytest.raises(ValueError, match="load it with AutoModelForSeq2SeqLM"):
            kind(hf.config)
    with pytest.raises(ValueError, match="load it with AutoModelForCausalLM"):
        wrapped(MegasparseForSeq2SeqLM, decoder("full"))
