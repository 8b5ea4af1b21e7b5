"""A cascade against single models, votes of small ones and early exit: Tabi repeated."""
