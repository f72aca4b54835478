"""The way of the data, from files on disk to batches of tokens.

tools/prepare_data.py turns a corpus into a folder that training reads: `corpora/` opens the source as a stream of
bytes and says where its splits begin and end, `prepare.py` cuts each split into samples (one tar member of 65,536
bytes) and writes them as webdataset shards beside one `index.json`. Text becomes tokens in `tokenizer.py`: so far a
token is a byte.

A run then goes through four stages, each in one file:

    index.py    the shards of each split, with their counts, sizes and sha256: read and checked once, at the start
    order.py    which sequence comes i-th. A sequence is a window of T tokens inside one shard. The order is a pure
                function of (seed, epoch, index): it is computed, never stored, and knows nothing of ranks
    reader.py   the tokens of a window, by byte offset inside the tar file. A shard is verified against its sha256
                before its first token is used: damage is an error that names the file, never a shorter epoch
    batches.py  for each optimizer step this rank's micro-batches, read ahead by a background thread

The whole state of the data is one number: the global sample number of the next step, the same on every rank. Resuming
in the middle of an epoch, or on another number of ranks, is arithmetic on it, and takes no longer late in an epoch
than early.

Evaluation reads a split as one contiguous stream over its shards instead (`reader.EvaluationStream`).
"""
