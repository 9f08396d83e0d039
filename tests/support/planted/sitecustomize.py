"""Plants a mutant in every interpreter that a test starts; see ``support.mutation_run``.

A folder for ``PYTHONPATH``: Python imports this by itself, before the program.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent.parent))

import support.mutation_import  # noqa: F401 - planting is what its import does
