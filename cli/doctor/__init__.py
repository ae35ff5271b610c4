"""``colibri doctor``: what this machine offers, what is advisable, and the command for it. A module per subject.

A subject is a function ``look(case: Case) -> list[Finding]`` in a module of its own, listed in ``command.SUBJECTS``.
"""
