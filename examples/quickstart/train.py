"""The training loop: AdamW on packed documents, checkpoints that a stopped run goes on from with the same bits."""

import hashlib
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quickstart.config import THREADS, Config
from quickstart.data import Corpus, make_pack, schedule
from quickstart.model import ByteModel

CHECKPOINT = "checkpoint.pt"
CHECKPOINT_SECONDS = 20.0


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or belongs to another run; the message says which and what to do."""


@dataclass
class Run:
    """A model in training: everything that a checkpoint holds, and nothing that it does not."""

    config: Config
    corpus: Corpus
    backend: str
    device: torch.device
    step: int = 0
    losses: list[float] = field(default_factory=list)

    def __post_init__(self):
        make_deterministic()
        self.model = ByteModel(self.config, self.backend).to(self.device)
        self.parameters = dict(sorted(self.model.named_parameters()))
        # The optimizer works on FP32 masters of the projections' BF16 weights; a master's gradient is the FP32 buffer
        # that the projection adds into.
        self.masters = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype == torch.float32:
                self.masters[name] = parameter
                continue
            self.masters[name] = parameter.detach().float()
            parameter.main_grad = torch.zeros_like(self.masters[name])
            self.masters[name].grad = parameter.main_grad
        decayed = [m for m in self.masters.values() if m.dim() == 2]
        plain = [m for m in self.masters.values() if m.dim() != 2]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate, betas=(0.9, 0.98), foreach=False)
        self.packs = schedule(self.corpus, self.config.steps, self.config.tokens, self.config.seed)

    def advance(self):
        """One training step."""
        rate = learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.zero_()
        pack = make_pack(self.packs[self.step], self.config.tokens).to(self.device)
        loss = self.model.loss(pack)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0, foreach=False)
        self.optimizer.step()
        self.round_masters()
        self.losses.append(loss.item())
        self.step += 1

    @torch.no_grad()
    def round_masters(self):
        """Gives the BF16 weights the values of their masters."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def weights_sha256(self) -> str:
        """SHA-256 over name, dtype, shape and bytes of every weight that the optimizer holds, in the order of names."""
        digest = hashlib.sha256()
        for name, tensor in self.masters.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    @torch.no_grad()
    def held_out_loss(self, most_bytes: int = 65536) -> tuple[float, int]:
        """Mean loss in nats a byte over held-out documents, and the number of bytes it was taken over."""
        total, count, waiting = 0.0, 0, []
        documents = list(self.corpus.held_out)
        while documents and count < most_bytes:
            room = self.config.tokens
            waiting = []
            while documents and len(documents[0]) <= room:
                waiting.append(documents.pop(0))
                room -= len(waiting[-1])
            pack = make_pack(waiting, self.config.tokens).to(self.device)
            total += self.model.loss(pack).item() * pack.used
            count += pack.used
        return total / count, count

    def save(self, folder: Path):
        """Writes the checkpoint, whole or not at all."""
        state = {
            "config": self.config.as_dict(),
            "corpus": self.corpus.fingerprint,
            "backend": self.backend,
            "step": self.step,
            "losses": self.losses,
            "weights": {name: tensor.detach() for name, tensor in self.masters.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        handle, name = tempfile.mkstemp(dir=folder, prefix=CHECKPOINT, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(state, file)
            os.replace(name, folder / CHECKPOINT)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def load(self, state: dict):
        """Goes on from what `save` wrote; raises `CheckpointError` when the data is not what it was."""
        if state["corpus"] != self.corpus.fingerprint:
            raise CheckpointError("resume: the text changed since the checkpoint was written, takes the same --data")
        with torch.no_grad():
            for name, tensor in self.masters.items():
                tensor.copy_(state["weights"][name])
        self.round_masters()
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], list(state["losses"])


def read_checkpoint(folder: Path) -> dict:
    """What `Run.save` wrote into `folder`; raises `CheckpointError` when there is none or it cannot be read."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise CheckpointError(f"resume: {folder} holds no {CHECKPOINT}, takes the folder of a run that was stopped")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"config", "corpus", "backend", "step", "losses", "weights", "optimizer"} - set(state)
    except Exception as problem:
        # torch raises whatever its unpickler met; all of it means the same to the person.
        raise CheckpointError(f"resume: {path} is damaged ({type(problem).__name__}), start a new run") from problem
    if missing:
        raise CheckpointError(f"resume: {path} lacks {', '.join(sorted(missing))}, takes one that the quickstart wrote")
    return state


def make_deterministic():
    """Sets what the bits of torch's own operations depend on: the thread count, and deterministic algorithms only."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    # Filling every fresh tensor would only cost time: nothing here reads what it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up over a twentieth of the run, then a cosine to a tenth."""
    warm = max(1, config.steps // 20)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    progress = (step - warm) / max(1, config.steps - warm)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class StopSignal:
    """Ctrl-C and SIGTERM ask for an end after the step at hand; a second one ends at once."""

    def __init__(self):
        self.received = False
        self._before = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number, frame):
        if self.received:
            raise KeyboardInterrupt
        self.received = True


def train(run: Run, folder: Path, until: int, report: Callable[[Run], None]) -> bool:
    """Trains up to step `until`; returns False when a signal stopped it earlier.

    A checkpoint is written every 20 seconds and at the end, whatever the end is; `report` is called after every step.
    """
    saved = time.monotonic()
    with StopSignal() as stop:
        while run.step < until and not stop.received:
            run.advance()
            report(run)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                run.save(folder)
                saved = time.monotonic()
        run.save(folder)
        return run.step >= until
