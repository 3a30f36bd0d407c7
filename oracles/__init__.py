"""What is true: the geometry, the oracles, the contract and the judge. Never imports the kernels."""

from .contract import CLAUSES, Contract
from .inputs import Inputs, Result
from .problem import Problem, Slot

__all__ = ["CLAUSES", "Contract", "Inputs", "Problem", "Result", "Slot"]
