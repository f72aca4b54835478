"""The data pipeline: `prepare.py` writes a corpus as a folder of webdataset shards and an index.json, and `batches.py`
reads this rank's micro-batches from it. The whole state of the data is the global sample number of the next step:
resuming is arithmetic on it.
"""
