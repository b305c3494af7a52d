"""The command line of the quickstart: `python -m quickstart --help`."""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

from cake_shared.errors import UnsupportedArchError
from quickstart.backend import choose_backend
from quickstart.config import THREADS, Config
from quickstart.data import DataError, load_corpus
from quickstart.progress import Progress
from quickstart.proofs import Proof, ProofStopped, prove_packs, prove_runs
from quickstart.report import PLOT, REPORT, UNIFORM, new_folder, plot_loss, write_report
from quickstart.train import CHECKPOINT, CheckpointError, Run, read_checkpoint, train

STOPPED = 130
HELP = {
    "steps": "training steps",
    "width": "width of the model; a multiple of --head-dim",
    "layers": "number of layers",
    "head_dim": "size of a head; width / head-dim key heads, twice as many value heads",
    "tokens": "bytes in the buffer of one step",
    "max_document": "longest document in bytes; longer texts are cut at blank lines",
    "learning_rate": "peak learning rate of AdamW",
    "seed": "seed of the weights and of the order of the documents",
}


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to an option's help, unless it is none or off."""

    def _get_help_string(self, action: argparse.Action) -> str:
        unsaid = action.default is None or action.default is False
        return action.help if unsaid else super()._get_help_string(action)


def parser() -> argparse.ArgumentParser:
    """The options; the settings' defaults are those of `Config`."""
    options = argparse.ArgumentParser(
        prog="quickstart",
        description="Trains a small byte-level Gated DeltaNet on packed documents, then proves that the bits repeat: "
        "again, stopped and resumed, and wherever a document lies in its pack.",
        formatter_class=HelpWithDefaults,
    )
    for field in dataclasses.fields(Config):
        options.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, help=HELP[field.name]
        )
    options.add_argument("--backend", choices=["auto", "cpu", "cuda"], default="auto", help="where to train")
    options.add_argument(
        "--data", type=Path, metavar="FOLDER", help="folder of your own text (default: Python's library)"
    )
    options.add_argument(
        "--out", type=Path, metavar="DIR", help="new folder for the results (default: runs/quickstart)"
    )
    options.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with the stopped run in this folder, with its settings"
    )
    options.add_argument("--stop-at", type=int, metavar="STEP", help="stop after this step, as Ctrl-C would")
    options.add_argument("--no-proofs", action="store_true", help="train only")
    # The runs that a proof starts: their name, lines instead of a bar, no proofs and no advice of their own.
    options.add_argument("--part", help=argparse.SUPPRESS)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs one quickstart; returns 0, 1 (a promise is broken), 2 (bad input) or 130 (stopped)."""
    options = parser().parse_args(arguments)
    try:
        return start(options)
    except (ValueError, DataError, CheckpointError, FileExistsError, UnsupportedArchError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped at once; the last checkpoint stays as it was", file=sys.stderr)
        return STOPPED


def start(options: argparse.Namespace) -> int:
    """Makes or resumes the run that the options describe, trains it, and proves what it promised."""
    state = read_checkpoint(options.resume) if options.resume else None
    if state:
        keep_settings(options, state)
    config = Config(
        **(state["config"] if state else {f.name: getattr(options, f.name) for f in dataclasses.fields(Config)})
    )
    until = config.steps if options.stop_at is None else options.stop_at
    if not 1 <= until <= config.steps:
        raise ValueError(f"stop-at: got {until}, takes 1 to the number of steps, {config.steps}")
    backend, reason = choose_backend(state["backend"] if state else options.backend, config.head_dim)
    if state and not options.part:
        reason = "the run to be resumed began there"
    corpus = load_corpus(options.data, config.max_document)
    folder = options.resume or new_folder(options.out)
    run = Run(config, corpus, backend, torch.device(backend))
    if state:
        run.load(state)
    if not options.part:
        introduce(run, reason, folder)
    begin = time.perf_counter()
    progress = Progress(config.steps, options.part or "train", first=run.step, lines=bool(options.part))
    finished = train(run, folder, until, lambda r: progress.show(r.step, r.losses[-1]))
    seconds = {"training": time.perf_counter() - begin}
    if run.step < config.steps:
        progress.end()
        if not options.part:
            print(f"Stopped at step {run.step} of {config.steps}; {folder / CHECKPOINT} holds all of it. To go on:")
            print(f"    nox -s quickstart -- --resume {folder}{f' --data {options.data}' if options.data else ''}")
        return 0 if finished else STOPPED
    loss, count = run.held_out_loss()
    held_out = {"loss_nats_per_byte": loss, "bytes": count}
    write_report(folder, run, reason=reason, seconds=seconds, proofs=None, held_out=held_out)
    plot_loss(folder / PLOT, run.losses, loss)
    if options.part:
        return 0
    tail = run.losses[-max(1, len(run.losses) // 20) :]
    print(
        f"Loss: {run.losses[0]:.2f} at the first step, {sum(tail) / len(tail):.2f} over the last {len(tail)}, "
        f"{loss:.2f} on {count} bytes of held-out documents ({UNIFORM}). {seconds['training']:.0f} s.\n"
    )
    begin = time.perf_counter()
    proofs = [] if options.no_proofs else prove(run, folder, options.data)
    if proofs is None:
        return STOPPED
    if proofs:
        seconds["proof"] = time.perf_counter() - begin
        write_report(folder, run, reason=reason, seconds=seconds, proofs=proofs, held_out=held_out)
    print(f"Loss plot: {folder / PLOT}\nReport:    {folder / REPORT}\nWeights:   {folder / CHECKPOINT}")
    return 0 if all(proof.holds for proof in proofs) else 1


def keep_settings(options: argparse.Namespace, state: dict):
    """Raises `ValueError` where an option asks for another setting than that of the run to be resumed."""
    settings = {**state["config"], "backend": state["backend"]}
    defaults = {field.name: field.default for field in dataclasses.fields(Config)} | {"backend": "auto"}
    for name, value in settings.items():
        got = getattr(options, name)
        if got not in (value, defaults[name]):
            raise ValueError(f"{name}: got {got}, takes {value}, the setting of the run in {options.resume}")
    if options.out is not None:
        raise ValueError(f"out: got {options.out}, takes nothing with resume: the run goes on in {options.resume}")


def introduce(run: Run, reason: str, folder: Path):
    """Says what is about to be trained, on what, where, and why there."""
    config, corpus = run.config, run.corpus
    documents = [document for pack in run.packs for document in pack]
    lengths = sorted(map(len, documents))
    used = sum(lengths) / (config.steps * config.tokens)
    parameters = sum(parameter.numel() for parameter in run.parameters.values())
    print(f"Backend:  {run.backend}, {THREADS} thread a run: {reason}")
    print(
        f"Text:     {corpus.source}: {len(corpus.train)} documents to train on, {len(corpus.held_out)} held out, "
        + (f"{corpus.bytes_total / 1e6:.1f} MB" if corpus.bytes_total >= 1e6 else f"{corpus.bytes_total / 1e3:.1f} kB")
    )
    print(
        f"Packs:    {config.steps} of {config.tokens} bytes; {len(documents)} documents of {lengths[0]} to "
        f"{lengths[-1]} bytes fill {100 * used:.1f} %"
    )
    print(
        f"Model:    {config.layers} Gated DeltaNet layers, width {config.width}, {config.key_heads} key and "
        f"{config.value_heads} value heads of {config.head_dim}, {parameters / 1e3:.0f} k weights, "
        "BF16 under activation checkpointing"
    )
    print(f"Folder:   {folder}\n", flush=True)


def prove(run: Run, folder: Path, data: Path | None) -> list[Proof] | None:
    """Makes and prints the proofs; None when the runs for them were stopped."""
    print(
        "Now the same training again and, beside it, once more stopped half way and resumed, in fresh processes.",
        flush=True,
    )
    proofs = prove_packs(run)
    try:
        proofs.insert(0, prove_runs(run, folder, data))
    except (ProofStopped, KeyboardInterrupt) as problem:
        print(f"\nThe training is complete, its proofs are not ({problem or 'stopped'}).", file=sys.stderr)
        return None
    print()
    for proof in proofs:
        print(proof.text() + "\n")
    return proofs


if __name__ == "__main__":
    sys.exit(main())
