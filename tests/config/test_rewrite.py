"""One value changed in a file's text, everything else as it was."""

import json

import pytest

from megasparse.config.rewrite import with_value

TEXT = """{
  "model": {
    "layers": 4, "note": "{\\"attention\\": {}}",
    "attention": {
      "pattern": ["local", "lsh"],
      "lsh": {"chunk": 8}
    }
  },
  "data": {"path": "x"}
}
"""


def test_an_added_value_is_written_as_its_neighbours_are():
    found = with_value(TEXT, ["model", "attention", "full_below"], 4096)
    assert found == TEXT.replace('      "pattern"', '      "full_below": 4096,\n      "pattern"')
    assert with_value(found, ["model", "attention", "full_below"], 5) == found.replace("4096", "5")
    assert with_value('{"a": 1}', ["b"], 2) == '{"b": 2, "a": 1}'


def test_sections_on_the_way_are_added():
    assert json.loads(with_value("{}", ["model", "attention"], 1)) == {"model": {"attention": 1}}
    found = with_value(TEXT, ["data", "more", "deep"], None)
    assert json.loads(found) == json.loads(TEXT) | {"data": {"more": {"deep": None}, "path": "x"}}


@pytest.mark.parametrize("text", ["[1]", '{"model": 3}', '{"model": null}'])
def test_what_is_no_object_has_no_keys(text):
    with pytest.raises(ValueError, match="no object"):
        with_value(text, ["model", "attention"], 1)
