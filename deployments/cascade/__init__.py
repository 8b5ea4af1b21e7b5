"""Which cascade of text classifiers serves: its profile, and the choice from it (Tabi §5)."""
