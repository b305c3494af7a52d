"""What a deterministic package promises, shown: hashes that must be equal, and whether they are."""

import hashlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from quickstart.data import make_pack
from quickstart.train import Run, StopSignal, read_checkpoint, tensor_bytes


@dataclass(frozen=True)
class Proof:
    """Hashes that must all be the same, why they must, and what each was taken of."""

    title: str
    why: str
    hashes: dict[str, str]

    @property
    def holds(self) -> bool:
        """Whether they are the same."""
        return len(set(self.hashes.values())) == 1

    def text(self) -> str:
        """The proof for a terminal: one short hash a line, and the verdict."""
        width = max(map(len, self.hashes))
        lines = [self.title, f"  why: {self.why}"]
        lines += [f"  {name.ljust(width)}  {value[:16]}" for name, value in self.hashes.items()]
        return "\n".join([*lines, "  equal, as promised" if self.holds else "  DIFFERENT: the promise is broken"])


class ProofStopped(Exception):
    """A run made for a proof was stopped from outside, or failed; the message says which."""


def prove_runs(run: Run, folder: Path, data: Path | None) -> Proof:
    """Trains the same settings again, and once more in two parts, in fresh processes; compares the weights.

    Raises `ProofStopped` when one of these runs failed or was stopped.
    """
    again, parts = folder / "proofs" / "again", folder / "proofs" / "stopped"
    half = run.config.steps // 2
    settings = [part for name, value in run.config.as_dict().items() for part in (f"--{dashed(name)}", str(value))]
    text = ["--data", str(data)] if data else []
    start = [*settings, "--backend", run.backend, *text]
    run_chains(
        [
            [["--part", "again", *start, "--out", str(again)]],
            [
                ["--part", "stopped", *start, "--out", str(parts), "--stop-at", str(half)],
                ["--part", "resumed", "--resume", str(parts), *text],
            ],
        ]
    )
    hashes = {"this run": run.weights_sha256()}
    for name, place in (("the same run again", again), (f"stopped at step {half}, resumed", parts)):
        other = Run(run.config, run.corpus, run.backend, run.device)
        other.load(read_checkpoint(place))
        if other.step != run.config.steps:
            raise ProofStopped(f"{name}: ended at step {other.step} of {run.config.steps}")
        hashes[name] = other.weights_sha256()
    return Proof(
        f"SHA-256 of the weights after {run.config.steps} steps",
        "the same inputs give the same bits in every process, and a checkpoint holds all that the next step depends on",
        hashes,
    )


def dashed(name: str) -> str:
    """The option of the command line that sets this field of the settings."""
    return name.replace("_", "-")


def run_chains(chains: list[list[list[str]]]):
    """Runs the quickstart's own command line in fresh processes: the chains side by side, the parts of one in turn.

    Raises `ProofStopped` when a process fails or a signal asks for an end; then none is left running.
    """
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path}
    waiting = [list(chain) for chain in chains]
    children = [start_next(chain, variables) for chain in waiting]
    try:
        with StopSignal() as stop:
            while any(child is not None for child in children):
                if stop.received:
                    raise ProofStopped("stopped")
                for i, child in enumerate(children):
                    if child is None or child.poll() is None:
                        continue
                    if child.returncode:
                        raise ProofStopped(f"a run for the proofs ended with status {child.returncode}")
                    children[i] = start_next(waiting[i], variables)
                time.sleep(0.02)
    finally:
        end_all([child for child in children if child is not None])


def start_next(chain: list[list[str]], variables: dict[str, str]) -> subprocess.Popen | None:
    """Starts the next process of a chain; None when all of it has run."""
    if not chain:
        return None
    return subprocess.Popen([sys.executable, "-m", "quickstart", *chain.pop(0)], env=variables)


def end_all(children: list[subprocess.Popen]):
    """Waits for processes that Ctrl-C reached too, then asks those that still run to end."""
    patience = time.monotonic() + 5.0
    for child in children:
        try:
            child.wait(timeout=max(0.0, patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.terminate()
    for child in children:
        child.wait()


def prove_packs(run: Run) -> list[Proof]:
    """Packs one held-out document alone, first, last and among others; compares the bits of outputs and gradients.

    The outputs are the model's logits and the recurrence's outputs of every layer; the gradients are those that the
    recurrence returns for q, k, v, g and beta in every layer, of the document's own loss.
    """
    documents = sorted(run.corpus.held_out + run.corpus.train[:8], key=len)
    # Not a multiple of the chunk of 64 tokens, so that its last chunk is ragged.
    ragged = [i for i, document in enumerate(documents) if len(document) % 64] or list(range(len(documents)))
    index = ragged[len(ragged) // 2]
    chosen = documents.pop(index)
    others = documents[-3:]
    places = {
        "alone": ([chosen], 0),
        "first": ([chosen, *others], 0),
        "last": ([*others, chosen], len(others)),
        "among others": ([*others[:1], chosen, *others[1:]], 1),
    }
    outputs, gradients = {}, {}
    for name, (documents, index) in places.items():
        outputs[name], gradients[name] = hash_document(run, documents, index)
    why = "the bits of a sequence depend on that sequence alone, not on its neighbours nor on its place in the pack"
    size = f"one document of {len(chosen)} bytes, packed in four ways"
    return [
        Proof(f"Outputs of {size}", why, outputs),
        Proof(f"Gradients of the recurrence for {size}", why, gradients),
    ]


def hash_document(run: Run, documents: list[bytes], index: int) -> tuple[str, str]:
    """SHA-256 of the outputs and of the recurrence's gradients of document `index` of a pack."""
    pack = make_pack(documents).to(run.device)
    begin, end = pack.cu_seqlens[index : index + 2].tolist()
    calls: list[dict[str, torch.Tensor]] = []
    mixers = [layer.mix for layer in run.model.layers]
    try:
        for mixer in mixers:
            mixer.watched = calls
        # Recomputation would watch every call twice.
        logits = run.model(pack, recompute=False)
    finally:
        for mixer in mixers:
            mixer.watched = None
    loss = torch.nn.functional.cross_entropy(logits[0, begin:end].float(), pack.targets[0, begin:end], reduction="sum")
    names = ("q", "k", "v", "g", "beta")
    grads = torch.autograd.grad(loss, [c[name] for c in calls for name in names])
    output, gradient = hashlib.sha256(), hashlib.sha256()
    output.update(tensor_bytes(logits[0, begin:end]))
    for watched in calls:
        output.update(tensor_bytes(watched["o"][0, begin:end]))
    for grad in grads:
        gradient.update(tensor_bytes(grad[0, begin:end]))
    return output.hexdigest(), gradient.hexdigest()
