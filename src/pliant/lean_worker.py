"""Keeps pandas out of a process in which it is imported before Ray Serve: of `pliant serve`, and of Ray's workers where
`ray_settings` is followed.

Serve imports pandas wherever it is installed, to encode data frames in answers, of which we have none: a third of its
import's time, and 25 MB, in each of a dozen processes.
"""

import sys

sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]  # from now on `import pandas` is an ImportError
