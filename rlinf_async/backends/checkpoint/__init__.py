"""Checkpoint folders: what is in them, how they are written, read, cut anew and exported.

::

    metadata.py      what metadata.json says
    tensor_file.py   one file of tensors: safetensors, written in one pass with its checksum
    folders.py       complete or not there: staging, commit, locks, what is kept, what is cleaned
    reading.py       any checkpoint folder as global tensors
    name_map.py      how tensor-parallel ranks cut a language model's tensors
    cutting.py       a trainer's folder as other ranks would have written it
    resharding.py    the same with what lies beside it: a run, to go on from
    exporting.py     a folder as transformers and vLLM load it

Nothing here knows a model or a process group; `rlinf_async.backends.fsdp` does.
"""
