"""Side-by-side measurements: right before fast, arms interleaved, both orders, an A/A arm, one result file a package.

`python -m cake_shared.bench run` measures every package of this checkout, `python -m cake_shared.bench readme` writes
the tables of the READMEs from the committed results.
"""

from cake_shared.bench.environment import describe_environment
from cake_shared.bench.result import Result, Table
from cake_shared.bench.suite import Suite
from cake_shared.bench.timing import Arm, Cell

__all__ = ["Arm", "Cell", "Result", "Suite", "Table", "describe_environment"]
