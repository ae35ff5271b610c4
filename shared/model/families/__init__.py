"""The model families, one module each, named like ``model_type`` in ``config.json``.

A family's module maps config.json to a ``ModelSpec`` (``spec``) and says under which names its checkpoints have the
tensors, where they differ from ours (``source_name``, ``mtp_source_name``, ``expert_source``), which values they store
otherwise (``added``), and which tensors are none of ours (``ignores``). Nothing else in the engine knows a family. A new one
is a new file here; ``shared.model.family`` finds it.
"""
