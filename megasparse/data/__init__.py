"""The data pipeline, from files on disk to batches of tokens.

`prepare.py` turns a corpus into a folder of webdataset shards and an index.json: `corpora/` reads the source and finds
its splits and documents, `encoders.py` makes tokens of them with `tokenizers/`, in the processes of `workers.py`.

A run reads the index once (`index.py`), finds the corpus, shard and window of the i-th sequence as a pure function of
seed and position (`order.py`), reads its tokens by offset inside the verified tar file (`reader.py`), and takes this
rank's micro-batches from a background thread (`batches.py`). `urls.py` fetches shards from URLs. The whole state of the
data is the global sample number of the next step: resuming is arithmetic on it.
"""
