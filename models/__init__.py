"""The embedded demonstration model (``fledgling/``) and how it was made (``train/``, README.md). A package, so that an
installed wheel carries the model's files and finds them."""
