"""Checkpoint folders: their files, and how they are written, read, resharded and exported.

::

    metadata.py      the contents of metadata.json
    tensor_file.py   one file of tensors: safetensors, written in one pass with its checksum
    folders.py       complete or absent: staging, commit, locks, retention, cleaning
    reading.py       any checkpoint folder as global tensors
    name_map.py      how tensor-parallel ranks split a language model's tensors
    cutting.py       a trainer's folder, resharded for other ranks
    resharding.py    the same with the other files of a checkpoint or a run, to resume from
    exporting.py     a folder that transformers and vLLM load

Models and process groups are the concern of `rlinf_async.backends.fsdp`.
"""
