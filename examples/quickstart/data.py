"""Documents of uneven length from real text, and packs: many documents in one token buffer with their offsets."""

import hashlib
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

# A document starts from this input byte, so that its first byte is predicted like every other; no text holds it.
START = 0
STANDARD_LIBRARY_SUFFIXES = {".py", ".txt", ".rst"}
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
HELD_OUT_SHARE = 16


class DataError(ValueError):
    """The text cannot be used: the message says which folder and why."""


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents kept aside, with a fingerprint of both."""

    source: str
    train: list[bytes]
    held_out: list[bytes]
    skipped_files: int
    fingerprint: str

    @property
    def bytes_total(self) -> int:
        """Bytes of all documents."""
        return sum(map(len, self.train)) + sum(map(len, self.held_out))


def load_corpus(folder: Path | None, max_document: int) -> Corpus:
    """Reads a folder of the user's own text, or the standard library's sources and texts when `folder` is None.

    Files are taken in the order of their relative paths and cut at blank lines into documents of at most
    `max_document` bytes (`cut_document`). One file in sixteen, chosen by the hash of its path, is held out whole; of a
    single file, its last documents. Hidden files are left out; empty and binary ones (with a zero byte) are skipped
    and counted. Raises `DataError` when the folder is missing, is not a folder, or holds too little text.
    """
    if folder is None:
        root, source = Path(sysconfig.get_path("stdlib")), "the Python standard library"
    else:
        root, source = folder, str(folder)
        if not root.exists():
            raise DataError(f"data: {folder} does not exist, takes a folder of text files")
        if not root.is_dir():
            raise DataError(f"data: {folder} is not a folder, takes a folder of text files")
    files, skipped = read_files(root, None if folder is not None else STANDARD_LIBRARY_SUFFIXES)
    if not files:
        raise DataError(f"data: no text in {source} ({skipped} files skipped as empty or binary)")
    cut = {name: cut_document(text, max_document) for name, text in files.items()}
    held_names = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())[: len(files) // HELD_OUT_SHARE]
    if not held_names and len(files) > 1:
        held_names = [min(files, key=lambda name: hashlib.sha256(name.encode()).digest())]
    if held_names:
        held_out = [document for name in sorted(held_names) for document in cut.pop(name)]
        train = [document for name in sorted(cut) for document in cut[name]]
    else:
        (documents,) = cut.values()
        kept = max(1, len(documents) // HELD_OUT_SHARE)
        train, held_out = documents[:-kept], documents[-kept:]
    if not train:
        raise DataError(f"data: {source} holds {len(held_out)} document, takes two or more (add text)")
    digest = hashlib.sha256()
    for part in (train, held_out):
        for document in part:
            digest.update(len(document).to_bytes(8, "little") + document)
    return Corpus(source, train, held_out, skipped, digest.hexdigest())


def read_files(root: Path, suffixes: set[str] | None) -> tuple[dict[str, bytes], int]:
    """The texts under `root` by relative path, in sorted order, and the number of files skipped."""
    names = []
    for folder, folders, files in os.walk(root):
        # What is pruned here is never walked: a library's folder may hold a hundred times its own text.
        unwanted = SKIPPED_FOLDERS if suffixes is not None else set()
        folders[:] = [name for name in folders if not name.startswith(".") and name not in unwanted]
        wanted = [name for name in files if not name.startswith(".")]
        if suffixes is not None:
            wanted = [name for name in wanted if Path(name).suffix in suffixes]
        names += [Path(folder, name).relative_to(root).as_posix() for name in wanted]
    texts, skipped = {}, 0
    for name in sorted(names):
        if not (root / name).is_file():
            continue
        text = (root / name).read_bytes()
        if not text.strip() or START in text:
            skipped += 1
            continue
        texts[name] = text
    return texts, skipped


def cut_document(text: bytes, most: int) -> list[bytes]:
    """Cuts a text into documents of at most `most` bytes, as uneven as the text makes them.

    A document ends at two blank lines, which stand between the definitions of a Python source. One that is longer is
    cut at single blank lines, a longer paragraph at `most` bytes.
    """
    documents = []
    for section in re.split(rb"\n\s*\n\s*\n", text):
        current = b""
        for paragraph in section.split(b"\n\n"):
            piece = paragraph.strip(b"\n") + b"\n\n"
            if not piece.strip():
                continue
            if current and len(current) + len(piece) > most:
                documents.append(current)
                current = b""
            while len(piece) > most:
                documents.append(piece[:most])
                piece = piece[most:]
            current += piece
        if current.strip():
            documents.append(current)
    return documents


@dataclass(frozen=True)
class Pack:
    """One training step's tokens.

    inputs, targets int64 `[1, T]`; cu_seqlens int32 `[N + 1]`: document n is tokens `cu_seqlens[n]` to
    `cu_seqlens[n + 1]`, and what lies beyond the last offset is padding. position int64 `[T]` is a token's place in its
    document. Document n's first input is `START`, its targets are its own bytes.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    position: torch.Tensor

    @property
    def used(self) -> int:
        """Number of tokens that belong to documents."""
        return int(self.cu_seqlens[-1])

    def to(self, device: torch.device) -> "Pack":
        """The pack on a device."""
        return Pack(*(x.to(device) for x in (self.inputs, self.targets, self.cu_seqlens, self.position)))


def make_pack(documents: list[bytes], capacity: int | None = None) -> Pack:
    """Packs documents one after the other into a buffer of `capacity` tokens, or of just their length.

    Raises `ValueError` when they do not fit.
    """
    used = sum(map(len, documents))
    capacity = used if capacity is None else capacity
    if used > capacity:
        raise ValueError(f"documents: got {used} bytes, takes at most the capacity, {capacity}")
    inputs = torch.zeros(1, capacity, dtype=torch.int64)
    targets = torch.zeros(1, capacity, dtype=torch.int64)
    position = torch.zeros(capacity, dtype=torch.int64)
    offsets = [0]
    for document in documents:
        begin, end = offsets[-1], offsets[-1] + len(document)
        text = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        targets[0, begin:end] = text
        inputs[0, begin] = START
        inputs[0, begin + 1 : end] = text[:-1]
        position[begin:end] = torch.arange(len(document))
        offsets.append(end)
    return Pack(inputs, targets, torch.tensor(offsets, dtype=torch.int32), position)


def schedule(corpus: Corpus, steps: int, capacity: int, seed: int) -> list[list[bytes]]:
    """The documents of every step, by corpus and seed alone: a resumed run reads on where it stopped.

    The documents are shuffled anew for every pass over them. A pack takes them in order; where the next one does not
    fit, a later one of the following 32 may, so that little of the buffer stays empty.
    """
    generator = torch.Generator().manual_seed(seed)
    queue: list[bytes] = []
    packs = []
    for _ in range(steps):
        room, chosen = capacity, []
        while True:
            if len(queue) < 32:
                order = torch.randperm(len(corpus.train), generator=generator).tolist()
                queue += [corpus.train[i] for i in order]
            fitting = next((i for i, document in enumerate(queue[:32]) if len(document) <= room), None)
            if fitting is None:
                break
            room -= len(queue[fitting])
            chosen.append(queue.pop(fitting))
        packs.append(chosen)
    return packs
