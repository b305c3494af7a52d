"""The result of one package's bench: a JSON file, a CSV file, text for the terminal and tables for the README."""

import csv
import io
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

SCHEMA = 1
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def markers(device: str = "cpu") -> tuple[str, str]:
    """The lines between which a README keeps the tables of the result file of that name (cpu, h200, ...)."""
    if device == "cpu":
        return BEGIN, END
    return BEGIN.replace("bench", f"bench-{device}"), END.replace("bench", f"bench-{device}")


class StaleReadmeError(RuntimeError):
    """A README's tables differ from what its result file says, or its markers are missing."""


@dataclass(frozen=True)
class Table:
    """Rows of short texts under a title; `note` says how the figures were taken. Not every table is for the README."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    readme: bool = True

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"rows: got one of {len(row)} entries, takes {len(self.columns)} as the columns do")

    def text(self) -> str:
        """The table for a terminal."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        drawn = ["  ".join(entry.ljust(width) for entry, width in zip(line, widths)).rstrip() for line in lines]
        drawn.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, *drawn, *([self.note] if self.note else [])])

    def markdown(self) -> str:
        """The table for a README."""
        lines = [f"**{self.title}**", ""]
        lines += ["| " + " | ".join(line) + " |" for line in (self.columns, ["---"] * len(self.columns), *self.rows)]
        return "\n".join([*lines, *(["", self.note] if self.note else [])])


@dataclass(frozen=True)
class Result:
    """Everything one bench run of a package found: the tables, and under `data` the figures behind them."""

    package: str
    environment: dict
    tables: list[Table]
    data: dict = field(default_factory=dict)
    schema: int = SCHEMA

    def save(self, path: Path):
        """Writes `path` (JSON) and its neighbour with the suffix .csv, each whole or not at all."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")
        write_whole(path.with_suffix(".csv"), self.csv())

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Reads what `save` wrote; raises `ValueError` for another schema."""
        raw = json.loads(path.read_text())
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"{path.name}: got result schema {raw.get('schema')!r}, takes {SCHEMA}")
        return cls(raw["package"], raw["environment"], [Table(**table) for table in raw["tables"]], raw["data"])

    def csv(self) -> str:
        """All tables as one list of figures: table, row, column, value."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["table", "row", "column", "value"])
        for table in self.tables:
            for row in table.rows:
                for column, value in zip(table.columns[1:], row[1:]):
                    writer.writerow([table.title, row[0], column, value])
        return out.getvalue()

    def text(self) -> str:
        """All of it for a terminal."""
        facts = ", ".join(f"{key} {value}" for key, value in self.environment.items())
        return "\n\n".join([f"{self.package} ({facts})", *(table.text() for table in self.tables)])

    def markdown(self, device: str = "cpu") -> str:
        """All of it for the README, the markers of that device included."""
        begin, end = markers(device)
        facts = ", ".join(f"{key} {value}" for key, value in self.environment.items())
        shown = [table.markdown() for table in self.tables if table.readme]
        parts = [begin, *shown, f"Taken on: {facts}.", end]
        return "\n\n".join(parts)


def write_whole(path: Path, text: str):
    """Writes a text file by renaming a finished one, so that no reader and no interruption leaves half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def update_readme(readme: Path, result: Result, *, check: bool, device: str = "cpu") -> bool:
    """Puts the result's tables between a device's markers of a README; returns whether the text changed.

    With `check` nothing is written and a difference raises `StaleReadmeError`, as missing markers always do.
    """
    text = readme.read_text()
    begin, end = markers(device)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise StaleReadmeError(f"{readme}: needs the lines {begin} and {end} once each, in this order")
    head, tail = text[: text.index(begin)], text[text.index(end) + len(end) :]
    new = head + result.markdown(device) + tail
    if new == text:
        return False
    if check:
        raise StaleReadmeError(f"{readme}: its tables are stale, run python -m cake_shared.bench readme")
    write_whole(readme, new)
    return True
