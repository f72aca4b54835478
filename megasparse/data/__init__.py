"""The way of the data, from files on disk to batches of tokens.

tools/prepare_data.py turns a corpus into a folder that training reads: `corpora/` opens the source as a stream of
bytes and says where its splits begin and end, `prepare.py` cuts each split into samples (one tar member of 65,536
bytes) and writes them as webdataset shards beside one `index.json`. Text becomes tokens in `tokenizers/`.

A run then goes through four stages, each in one file:

    index.py    the shards of each split, with their counts, sizes, sha256 and the crc32 of each sample: read and
                checked once, at the start (`index_file.py` is what is on disk)
    order.py    which sequence comes i-th. A sequence is a window of T tokens inside one shard. The order is a pure
                function of (seed, epoch, index): it is computed, never stored, and knows nothing of ranks
    reader.py   the tokens of a window, by byte offset inside the tar file (`members.py` knows its inside). A shard is
                verified against its sha256 before its first token is used, and again when the file changes
    batches.py  for each optimizer step this rank's micro-batches, read ahead by a background thread

Damage is never silent, and never makes an epoch shorter. With data.max_damaged = 0 it is an error that names the
shard, and the member and byte offset where the index tells. Above 0 only the samples whose own crc32 does not fit are
lost, up to that part of the split: `damage.py` counts each of them by shard and reason and names it once, and a
sequence that needs one is replaced by another, chosen by the content alone. Evaluation tolerates no damage.

The whole state of the data is one number: the global sample number of the next step, the same on every rank. Resuming
in the middle of an epoch, or on another number of ranks, is arithmetic on it, and takes no longer late in an epoch
than early.

Evaluation reads a split as one contiguous stream over its shards instead (`reader.EvaluationStream`).
"""
