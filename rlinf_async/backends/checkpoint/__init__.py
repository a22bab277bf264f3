"""Checkpoint folders: their files, and how they are written, read, resharded and exported.

::

    folders.py      metadata.json; complete or absent: staging, commit, locks, retention, cleaning
    tensor_file.py  one file of tensors: safetensors, written in one pass with its checksum
    reading.py      any checkpoint folder as global tensors
    writing.py      a snapshot of a trainer's tensors, and its writer
    exporting.py    a folder for other ranks, to resume from; one for transformers or vLLM
    streaming.py    copies of files and tensors in bounded memory
    collectives.py  ranks that succeed or fail together

Models and process groups are the concern of `rlinf_async.backends.fsdp`.
"""
