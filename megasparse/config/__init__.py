"""A run's configuration: one JSON file, checked against a typed schema that holds every default.

schema.py             the sections, their keys, types, defaults and meaning
strict_json.py        JSON without surprises: duplicate keys, comments and NaN are errors with their line
shipped.py            the configurations that come with the package, by name
extends.py            what a file takes from another one
load.py               file + `--set section.key=value` -> Config
messages.py           pydantic's errors as one line: the key, the value, the hint
checks.py             what must hold between keys
buckets.py            LSH bucket counts
deepspeed_section.py  every key of the `deepspeed` section, checked against DeepSpeed's own models
"""
