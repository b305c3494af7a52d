"""Errors of the CUDA programs against float64 on a GPU, beside FLA's where it is installed, and what is too large.

    python packages/cake_gdn_det_train/benchmarks/accuracy.py --write

Under mild gates every result is held to 4.5e-3. Under the default gates of a Qwen-style layer, and at 16384 tokens, it
is held to 1.1 times FLA's error. Closed forms need no reference (see `closed_forms`).
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

import cake_gdn_det_train
from cake_gdn_det_train import chunk_gated_delta_rule
from cake_shared.bench.gdn_bench import describe_gpu, gpu_name
from cake_shared.bench.gdn_oracle import float64_rule
from cake_shared.bench.gdn_peers import GdnArm, installed_peers
from cake_shared.bench.gpu import gpu_facts
from cake_shared.bench.result import Result, Table
from cake_shared.testing.gdn_cuda import moved
from cake_shared.testing.gdn_inputs import GdnCase, base, packed, states
from cake_shared.testing.gdn_reference import widened
from cake_shared.testing.gdn_run import run

PACKAGE = "cake_gdn_det_train"
MILD_LIMIT, OVER_FLA, CF1_LIMIT, ROUNDING = 4.5e-3, 1.1, 5e-2, 5e-3
RESULTS = {
    "o": "o",
    "final_state": "state",
    "dq": "dq",
    "dk": "dk",
    "dv": "dv",
    "dg": "dg",
    "dbeta": "dbeta",
    "d_initial_state": "dh0",
}
HEADS, VALUE_HEADS = 8, 16
# Betas just below 1 are what a saturated sigmoid gives: T = (I + A)^-1 then has one large diagonal that BF16 rounds.
CF1_TOKENS, CF1_BETAS, CF1_GATES = (128, 1024, 16384, 131072), (1.0, 0.99966466, 0.998), (0.0, -1e-3)
# Name, lengths, gates, dtype of beta, what limits it: "mild", "FLA" or nothing.
CASES = (
    ("4 x 1024, mild", (1024,) * 4, "Gmild", torch.float32, "mild"),
    ("4 x 1024, mild, BF16 beta", (1024,) * 4, "Gmild", torch.bfloat16, "mild"),
    ("1000 + 1 + 70 + 330, mild", (1000, 1, 70, 330), "Gmild", torch.float32, "mild"),
    ("1 x 16384, mild", (16384,), "Gmild", torch.float32, "mild, FLA"),
    ("4 x 1024, default", (1024,) * 4, "Gqwen", torch.float32, "FLA"),
    ("4 x 1024, default, BF16 beta", (1024,) * 4, "Gqwen", torch.bfloat16, "FLA"),
    ("1 x 16384, default", (16384,), "Gqwen", torch.float32, "FLA"),
    ("4 x 1024, half of the gates 0", (1024,) * 4, "G0.5", torch.float32, ""),
    ("4 x 1024, gates 0", (1024,) * 4, "G0", torch.float32, ""),
)


def one_configuration():
    """Without choices kept in its cache, lets Triton take each kernel's first configuration: choosing takes minutes."""
    kept = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    if any(kept.rglob("*.autotune.json")):
        return
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:  # then no peer is there either
        return
    Autotuner.prune_configs = lambda self, kwargs: self.configs[:1]


def make_case(lengths, gate: str, beta_dtype: torch.dtype) -> GdnCase:
    """A pack with initial states and gradients of its final states, on the GPU."""
    case = packed(base(sum(lengths), HEADS, VALUE_HEADS, gate=gate), lengths)
    h0, ds = states(case, len(lengths))
    return moved(case.with_(initial_state=h0, d_state=ds, beta=case.beta.to(beta_dtype)), "cuda")


def relative(got: torch.Tensor, right: torch.Tensor) -> float:
    """L2 error over the norm of the float64 result; infinity where something is not finite."""
    got = got.detach().double()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - right).norm() / right.norm().clamp_min(torch.finfo(torch.float64).tiny))


def errors_of(arm: GdnArm, case: GdnCase, right: dict) -> dict[str, float]:
    """Relative error of every result of an arm."""
    results = run(arm.rule, case.with_(cu_seqlens=case.cu_seqlens.to(arm.offsets_dtype)))
    return {name: relative(results[name], right[name]) for name in RESULTS}


def too_large(name: str, limits: str, ours: dict, fla: dict | None) -> list[str]:
    """Sentences about the errors that pass their limits."""
    found = []
    for result, error in ours.items():
        if "mild" in limits and not error <= MILD_LIMIT:
            found.append(f"{name}: {result} has error {error:.2e}, the limit is {MILD_LIMIT:.1e}")
        if "FLA" in limits and fla and not error <= OVER_FLA * fla[result]:
            found.append(f"{name}: {result} has error {error:.2e}, FLA's is {fla[result]:.2e}")
    return found


def error_table(figures: dict) -> Table:
    """Errors of every case and arm."""
    rows = [
        [f"{name}: {arm}", *(f"{errors[result]:.2e}" for result in RESULTS)]
        for name, by_arm in figures.items()
        for arm, errors in by_arm.items()
    ]
    note = (
        f"Relative L2 error against float64 by chunks, each result over its own norm; H/HV {HEADS}/{VALUE_HEADS}, beta "
        "sigmoid(normal), initial and final states. Mild gates are logsigmoid(normal)/16, default gates -A "
        f"softplus(x + 1) with A spread over (0, 16]. Limits: {MILD_LIMIT:.1e} under mild gates; {OVER_FLA} times "
        "FLA's under default gates and at 16384 tokens."
    )
    return Table("Errors against float64", ["case", *RESULTS.values()], rows, note)


def one_key(case: GdnCase, beta: float, gate: float) -> GdnCase:
    """The case with one basis vector as the key of every token, one beta and one gate."""
    k = torch.zeros_like(case.k)
    k[..., 5] = 1.0
    return case.with_(k=k, beta=torch.full_like(case.beta, beta), g=torch.full_like(case.g, gate))


def latest_values(case: GdnCase) -> torch.Tensor:
    """CF1 in float64: the only live row is u_t = exp(g) (1 - beta) u_(t-1) + beta v_t; o_t = scale (q_t . k) u_t."""
    beta = float(case.beta[0, 0, 0].double())
    decay = float(case.g[0, 0, 0].double().exp()) * (1.0 - beta)
    v, u = case.v.double(), torch.zeros_like(case.v, dtype=torch.float64)
    for back in range(8):  # what is older is below 2^-60 of it
        u[:, back:] += beta * decay**back * v[:, : v.shape[1] - back]
    return case.scale * case.q[..., 5].double()[..., None] * u


def identical_keys(rule: Callable, tokens: int) -> dict[str, float]:
    """CF1: one unit key and a beta of about 1 give the latest value at any length; errors of all and late tokens."""
    found = {}
    plain = moved(base(tokens, 1, 2), "cuda")
    for beta, gate in product(CF1_BETAS, CF1_GATES):
        case = one_key(plain, beta, gate)
        with torch.no_grad():
            o = rule(case.q, case.k, case.v, case.g, case.beta)[0]
        right = latest_values(case)
        name = f"CF1, beta = {beta:g}, g = {gate:g}"
        found[f"{name}, {tokens} tokens"] = relative(o, right)
        found[f"{name}, the last 64 of {tokens}"] = relative(o[:, -64:], right[:, -64:])
    return found


def other_forms(rule: Callable) -> dict[str, float]:
    """CF2 to CF4, each over the norm of the right result (CF2: of 2 k v^T)."""
    found = {}
    for tokens in (127, 128, 200):
        case = one_key(moved(base(tokens, 1, 2), "cuda"), 2.0, 0.0)
        v = case.v[:, :1].expand(case.v.shape)
        state = rule(case.q, case.k, v, case.g, case.beta, output_final_state=True)[1].detach().double()
        right = torch.zeros_like(state)
        right[0, :, 5] = 2.0 * v[0, 0].double()
        error = state - right if tokens % 2 else state
        found[f"CF2, {tokens} tokens"] = float(error.norm() / right.norm())
    for heads, count in ((1, 70000), (24, 2731)):
        case = moved(base(count, heads, heads), "cuda")
        offsets = torch.arange(count + 1, dtype=torch.int32, device="cuda")
        o = rule(case.q, case.k, case.v, case.g, case.beta, cu_seqlens=offsets)[0]
        score = (case.q.double() * case.k.double()).sum(-1) * case.beta.double() * case.scale
        found[f"CF3, {count} sequences of one token, {heads} heads"] = relative(o, score[..., None] * case.v.double())
    case = moved(base(128, 1, 1, gate="G0", beta="b1"), "cuda")
    k = torch.eye(128, dtype=torch.bfloat16, device="cuda")[None, :, None]
    o = rule(case.q, k, case.v, case.g, case.beta)[0]
    right = case.scale * (case.q[0, :, 0].double().tril() @ case.v[0, :, 0].double())
    found["CF4, 128 basis vectors"] = relative(o[0, :, 0], right)
    return found


def too_large_forms(forms: dict[str, float]) -> list[str]:
    """Sentences about closed forms that pass their limits; CF1 may not grow with the length beyond its own scatter."""
    limits = {name: CF1_LIMIT if name.startswith("CF1") else ROUNDING for name in forms}
    found = [f"{name}: error {e:.2e}, limit {limits[name]:.0e}" for name, e in forms.items() if not e <= limits[name]]
    for beta, gate in product(CF1_BETAS, CF1_GATES):
        name = f"CF1, beta = {beta:g}, g = {gate:g}"
        short, long = (forms.get(f"{name}, the last 64 of {tokens}") for tokens in (CF1_TOKENS[1], CF1_TOKENS[-1]))
        if short is not None and long is not None and long > 1.5 * short:
            found.append(f"{name}: the error grows from {short:.2e} to {long:.2e}")
    return found


def form_table(forms: dict[str, float]) -> Table:
    """Errors of the closed forms."""
    note = (
        "CF1: one unit key and beta of about 1, where o is scale (q . k) times the latest value, or nearly. CF2: the "
        "same key, beta 2, g 0, constant v, the state is 2 k v^T and 0 in turn. CF3: sequences of one token. CF4: "
        "basis vectors as keys, beta 1, g 0. Limits: "
        f"{CF1_LIMIT:.0e} for CF1, {ROUNDING:.0e} for the others."
    )
    return Table("Closed forms", ["form", "error of ours"], [[name, f"{e:.2e}"] for name, e in forms.items()], note)


class Findings:
    """What has been measured so far, written after each row: a run that is cut short keeps what it had.

    Attributes
    ----------
    errors, forms : dict
        By case and arm, and by closed form.
    missing : list of str
        What was not measured, and why.
    """

    def __init__(self, environment: dict, path: Path | None):
        self.begin = time.monotonic()
        self.environment, self.path = environment, path
        self.errors: dict[str, dict] = {}
        self.forms: dict[str, float] = {}
        self.missing: list[str] = []

    def failures(self) -> list[str]:
        """Sentences about what passes its limit."""
        found = too_large_forms(self.forms)
        for name, _, _, _, limits in CASES:
            by_arm = self.errors.get(name, {})
            found += too_large(name, limits, by_arm.get("ours", {}), by_arm.get("FLA"))
        return found

    def save(self, missing: list[str]) -> Result:
        """The result as it stands, written where one is to be kept."""
        facts = {**self.environment, "seconds": round(time.monotonic() - self.begin)}
        data = {
            "errors": self.errors,
            "closed_forms": self.forms,
            "failures": self.failures(),
            "missing": [*self.missing, *missing],
        }
        result = Result(PACKAGE, facts, [error_table(self.errors), form_table(self.forms)], data)
        if self.path:
            result.save(self.path)
        return result


def measure(found: Findings, ours: GdnArm, peers: Callable[[], list[GdnArm]], seconds: float) -> Result:
    """Closed forms and ours on every case, then the peers, whose import may take long, as far as the time goes."""
    cases: dict[str, tuple] = {}

    def errors(arm: GdnArm, name: str, *made):
        if name not in cases:
            case = make_case(*made)
            cases[name] = case, run(float64_rule, widened(case))
        found.errors.setdefault(name, {})[arm.name] = errors_of(arm, *cases[name])
        print(f"{name}: {arm.name}: {', '.join(f'{e:.2e}' for e in found.errors[name][arm.name].values())}", flush=True)

    def rows_of(arm: GdnArm, chosen) -> list[tuple[str, Callable[[], object]]]:
        return [
            (f"{name}: {arm.name}", lambda name=name, made=made: errors(arm, name, *made)) for name, *made, _ in chosen
        ]

    def run_rows(rows: list[tuple[str, Callable[[], object]]]):
        for place, (what, row) in enumerate(rows):
            if time.monotonic() - found.begin > seconds:
                found.missing += [f"not measured for want of time: {left}" for left, _ in rows[place:]]
                break
            row()
            print(f"{time.monotonic() - found.begin:.1f} s: {what}", flush=True)
            found.save([f"not measured: {left}" for left, _ in rows[place + 1 :]])

    run_rows(
        [
            ("closed forms CF2 to CF4", lambda: found.forms.update(other_forms(ours.rule))),
            *((f"CF1 of {n} tokens", lambda n=n: found.forms.update(identical_keys(ours.rule, n))) for n in CF1_TOKENS),
            *rows_of(ours, CASES),
        ]
    )
    for arm in peers():
        found.environment[arm.name] = arm.version
        run_rows(rows_of(arm, sorted(CASES, key=lambda case: "FLA" not in case[-1])))  # first what limits ours
    return found.save([])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--out", type=Path, help="write the result to this file instead")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after that")
    parser.add_argument("--commit", default="", help="commit of this tree where git cannot say it")
    options = parser.parse_args()
    ours = GdnArm("ours", chunk_gated_delta_rule, torch.int32, cake_gdn_det_train.__version__)
    environment = describe_gpu(Path(__file__).resolve().parents[3], options.commit)
    environment.update({"driver": gpu_facts()["driver"], ours.name: ours.version})
    kept = Path(__file__).parent / "results" / f"accuracy-{gpu_name()}.json"
    found = Findings(environment, options.out or (kept if options.write else None))

    def peers() -> list[GdnArm]:
        one_configuration()
        arms, missing = installed_peers(("FLA",))
        found.missing += missing
        return arms

    result = measure(found, ours, peers, options.seconds)
    print(result.text())
    failures = found.failures()
    print("\n".join([*found.missing, *failures]), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
