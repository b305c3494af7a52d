"""Problem -> Plan of this package: every choice that a call leads to, as a frozen printable value.

On the CPU both `cake_gdn_det_train` and `cake_gdn_train` run one program, the one that `Plan.program` names.
"""

from cake_shared.gdn.plan import Plan, Problem, plan_rule

__all__ = ["Plan", "Problem", "plan", "program_identity"]


def plan(problem: Problem) -> Plan:
    """Return the plan by which this package serves a problem on the CPU; `print` it to read it."""
    return plan_rule(problem)


def program_identity() -> str:
    """Return name and version of the program that runs on the CPU: packages with equal names give equal bits there."""
    return plan(Problem(1, 1, (1,), 1, 1, 1, 1)).program
