"""The attention of each layer."""

from megasparse.config.attention import MECHANISMS, AttentionConfig, heads_of_layer, kinds, layers_with
from megasparse.config.load import build_config


def model(pattern):
    settings = {"layers": 4, "d_model": 32, "heads": 4, "max_length": 64, "attention": {"pattern": pattern}}
    return build_config({"model": settings, "data": {"sequence_length": 64}}, []).model


def test_a_pattern_repeats_over_the_depth():
    mixed = model(["local", {"local": 1, "lsh": 3}])
    assert [heads_of_layer(mixed, layer) for layer in range(4)] == [{"local": 4}, {"local": 1, "lsh": 3}] * 2
    assert layers_with(mixed, "local") == 4 and layers_with(mixed, "lsh") == 2 and layers_with(mixed, "lha") == 0
    assert kinds(mixed) == ["local", "lsh"]


def test_the_order_of_an_objects_keys_means_nothing():
    """A checkpoint's manifest sorts them."""
    one, other = model([{"lsh": 3, "local": 1}]), model([{"local": 1, "lsh": 3}])
    assert list(heads_of_layer(one, 0).items()) == list(heads_of_layer(other, 0).items()) == [("local", 1), ("lsh", 3)]


def test_a_list_as_long_as_the_depth_puts_mechanisms_on_top():
    top = model(["local", "local", "lha", "lha"])
    assert [list(heads_of_layer(top, layer)) for layer in range(4)] == [["local"], ["local"], ["lha"], ["lha"]]


def test_the_order_of_the_mechanisms_never_changes():
    """It is the order of the heads of a layer that several share, and so of the rows of its weights."""
    shipped = ["full", "local", "lsh", "lha", "yoso", "smart_bird", "smyrf", "routing", "random", "sparse_transformer"]
    shipped += ["longformer", "bigbird", "performer", "linformer", "ngram"]
    assert [kind for kind in MECHANISMS if not kind.startswith("toy")] == shipped
    assert [name for name in AttentionConfig.model_fields if name in MECHANISMS] == list(MECHANISMS)
