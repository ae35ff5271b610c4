"""``colibri cache-sim``: residency policies judged on recorded routing."""
