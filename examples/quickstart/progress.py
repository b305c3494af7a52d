"""A progress bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import TextIO


class Progress:
    """Shows step, loss and the time left of a run of `steps` steps."""

    def __init__(self, steps: int, label: str, *, first: int = 0, lines: bool = False, out: TextIO | None = None):
        self.steps, self.label, self.first = steps, label.ljust(7), first
        self.out = sys.stdout if out is None else out
        self.begin = time.monotonic()
        self.on_terminal = self.out.isatty() and not lines
        # A line a tenth of the way where there is no terminal, so that a log stays short.
        self.every = 1 if self.on_terminal else max(1, steps // 10)

    def show(self, step: int, loss: float):
        """Called after step number `step` (the first is 1) with its loss in nats a byte."""
        if step % self.every and step != self.steps:
            return
        elapsed = time.monotonic() - self.begin
        left = elapsed / max(1, step - self.first) * (self.steps - step)
        filled = 24 * step // self.steps
        bar = "=" * filled + " " * (24 - filled)
        line = f"{self.label} [{bar}] {step}/{self.steps}  loss {loss:.3f} nats/byte  {left:.0f} s left"
        if self.on_terminal:
            self.out.write("\r\x1b[2K" + line + ("\n" if step == self.steps else ""))
        else:
            self.out.write(line + "\n")
        self.out.flush()

    def end(self):
        """Leaves the bar's line when the run ended before its last step."""
        if self.on_terminal:
            self.out.write("\n")
            self.out.flush()
