"""Keeps pandas out of Ray's worker processes, which import this module first where `ray_settings` is followed.

Ray Serve imports pandas wherever it is installed, to encode data frames in answers, of which we have none: a third of
its import's time, and 25 MB, in each of a dozen processes.
"""

import sys

sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]  # from now on `import pandas` is an ImportError
