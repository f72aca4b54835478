"""The data pipeline, from files on disk to batches of tokens.

`prepare.py` turns a corpus into a folder of webdataset shards and an index.json: `corpora/` reads the source and finds
its splits and documents, `encoders.py` makes tokens of them with `tokenizers/`, in the processes of `workers.py`.

A run then goes through four stages:

    index.py      the shards of each split, with their counts, sizes and sha256: read and checked once, at the start
                  (`index_file.py` is the format on disk)
    order.py      the corpus of the i-th sequence, by the corpora's weights, and the position of its window of T tokens
                  inside a shard. Both are pure functions of (seed, position): computed, never stored, the same on
                  every rank
    reader.py     its tokens, by byte offset inside the tar file (`shard_file.py`). A shard is verified against its
                  sha256 before its first token is used, and again when the file changes. Evaluation reads a split as
                  one stream
    batches.py    this rank's micro-batches of each optimizer step, read ahead by a background thread

A folder may be at a URL: `urls.py` knows the stores, and fetches each shard whole into a cache on this machine.
The whole state of the data is the global sample number of the next step, the same on every rank: resuming,
also on another number of ranks, is arithmetic on it.
"""
