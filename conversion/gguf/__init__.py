"""GGUF files, the format of llama.cpp, as checkpoints that ``colibri convert`` reads.

``header`` reads what a file says of itself, ``architectures`` makes of it a config.json and the names of tensors,
``vocabulary`` the tokenizer's files, ``checkpoint`` reads the tensors. Block formats are the ``gguf`` library's to dequantise.
"""
