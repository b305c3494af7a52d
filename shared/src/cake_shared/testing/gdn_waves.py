"""Waves of a native backward pass that the plan would not choose, for tests: they move no bit."""

import dataclasses

from cake_shared.gdn.cuda import plan as plans
from cake_shared.gdn.cuda.rule import PreparedCall


def force_waves(patch, key_heads, halves, warps=None):
    """Make backward passes run in waves of so many key heads and of one or two halves of every segment.

    Parameters
    ----------
    patch : pytest.MonkeyPatch
        Undoes it.
    key_heads : int
        At most those of a call.
    halves : int
        1, or 2 for the later halves of all segments before the earlier ones.
    warps : int, optional
        Of a chain's CTA, 4 or 8; the plan's by default.
    """

    def planned(call, make, choice):
        problem = plans.Problem(*call._problem, call._backend.multiprocessors, call._backend.native)
        if make is not plans.plan_backward:
            return make(problem, choice)
        with patch.context() as choosing:
            choosing.setattr(plans, "backward_waves", lambda *_: (min(key_heads, problem.key_heads), halves))
            plan = make.__wrapped__(problem, choice)
        return dataclasses.replace(plan, wave_warps=warps or plan.wave_warps)

    patch.setattr(PreparedCall, "_plan", planned)
