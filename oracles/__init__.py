"""What is true: geometry and inputs, the oracles, the contract and the judge. Never imports the kernels.

The names below are functions and classes; where a module bears the same name (`mp`, `eager`, ...), import from it as
`from csa_gate.oracles.eager import NUMERICS`.
"""

from .bound import error_bound
from .contract import CLAUSES, Contract
from .distributions import DISTRIBUTIONS, make_inputs
from .eager import NUMERICS, Numerics, eager
from .fp64 import fp64
from .inputs import Inputs, Result
from .judge import compare, judge
from .mp import mp
from .ordered import ordered
from .parse import parse_problem
from .problem import Problem, Slot
from .verdict import Failure, Verdict

__all__ = [
    "CLAUSES",
    "DISTRIBUTIONS",
    "NUMERICS",
    "Contract",
    "Failure",
    "Inputs",
    "Numerics",
    "Problem",
    "Result",
    "Slot",
    "Verdict",
    "compare",
    "eager",
    "error_bound",
    "fp64",
    "judge",
    "make_inputs",
    "mp",
    "ordered",
    "parse_problem",
]
