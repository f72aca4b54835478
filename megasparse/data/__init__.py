"""The data pipeline, from files on disk to batches of tokens.

megasparse prepare-data turns a corpus into a folder that training reads: `corpora/` reads the source and says where its
splits and documents begin and end, an encoder makes tokens of them (those of text are in `tokenizers/`), and
`prepare.py` cuts each split into samples (one tar member each) and writes them as webdataset shards beside one
`index.json`. A token is an unsigned number of 1, 2 or 4 bytes, little endian; the index says which. Where a sequence
must be one whole thing (an image, a pair of texts), the index states its tokens as `record`, and a run of another
sequence length is refused, as is one of another tokenizer.

A run then goes through four stages, each in one file:

    index.py      the shards of each split, with their counts, sizes and sha256: read and checked once, at the start
                  (`index_file.py` is the format on disk)
    order.py      of several corpora with weights, which one the i-th sequence is from; and where a corpus' i-th
                  sequence is: a window of T tokens inside one shard. Both orders are pure functions of (seed,
                  position): they are computed, never stored, and know nothing of ranks
    reader.py     its tokens, read by byte offset inside the tar file. A shard is verified against its sha256 before its
                  first token is used, and again when the file changes
    batches.py    for each optimizer step this rank's micro-batches, read ahead by a background thread

Each corpus of a mixture has epochs of its own: a small one of a great weight begins its second while a large one is
still in its first, and in none of them a sequence is lost or comes twice.

A missing or damaged shard is an error that names it: sizes are checked at the start, content before it is used.

A folder may be at a URL: `remote.py` fetches each shard whole into `shard_cache.py`, a folder of this machine, verifies
it and reads it there, so that nothing of the above changes. `fetching.py` asks again where the server fails, `urls.py`
knows http and S3.

The whole state of the data is one number: the global sample number of the next step, the same on every rank. Resuming
in the middle of an epoch, or on another number of ranks, is arithmetic on it, and takes no longer late in an epoch
than early.

Evaluation reads a split as one contiguous stream over its shards instead (`reader.EvaluationStream`).
"""
