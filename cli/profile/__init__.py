"""``colibri profile``: where the time of an answer goes. Collecting, analysing and telling are a module each."""
