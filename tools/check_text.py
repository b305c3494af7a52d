"""Fails where a tracked text names a machine's own paths or a package registry's host, or a code file grew too long."""

import re
import subprocess
import sys
from pathlib import Path

LIMIT_LINES = 560
CODE = {".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc"}
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.$}/<-])/(?:work|root|home|mnt|opt|Users)/[\w.+-]+"),
    "a package registry's host": re.compile(r"\b(?:[\w-]+\.)?(?:pypi|pythonhosted|npmjs|debian)\.(?:org|com|io)\b"),
    "an unresolved merge": re.compile(r"^(?:<{7}|>{7}) "),
}
# An explanation of how a compiler is found may name where systems keep theirs.
ALLOWED = re.compile(r"/opt/(?:cuda|nvidia)\b")


def tracked(root: Path) -> list[Path]:
    """Every file that git tracks and that is still there."""
    listing = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True).stdout
    return [path for name in listing.decode().split("\0") if name and (path := root / name).is_file()]


def problems_of(text: str) -> list[tuple[int, str, str]]:
    """(line number, kind, match) of everything in `text` that should not be there."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        for kind, pattern in FORBIDDEN.items():
            found += [(number, kind, match[0]) for match in pattern.finditer(line) if not ALLOWED.match(match[0])]
    return found


def main() -> int:
    """Prints every problem; returns 1 when there is one."""
    root = Path(__file__).resolve().parents[1]
    failures = []
    for path in tracked(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        name = path.relative_to(root)
        failures += [f"{name}:{number}: {kind}: {match}" for number, kind, match in problems_of(text)]
        lines = text.count("\n")
        if path.suffix in CODE and lines > LIMIT_LINES:
            failures.append(f"{name}: {lines} lines, a file of more than about 500 is two files")
    print("\n".join(failures) if failures else "the project's text: nothing to object to")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
