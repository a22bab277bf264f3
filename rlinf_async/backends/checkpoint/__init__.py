"""Checkpoint folders: what is in them, how they are written, read, cut anew and exported.

::

    metadata.py      what metadata.json says
    tensor_file.py   one file of tensors: safetensors, written in one pass with its checksum
    folders.py       complete or not there: staging, commit, locks, what is kept, what is cleaned
    reading.py       any checkpoint folder as global tensors
    resharding.py    a folder as other ranks would have written it
    exporting.py     a folder as transformers and vLLM load it

Nothing here knows a model or a process group; `rlinf_async.backends.fsdp` does.
"""
