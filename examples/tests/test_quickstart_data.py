"""Documents, packs and the order in which they are read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quickstart.data import START, DataError, cut_document, load_corpus, make_pack, schedule


@given(st.lists(st.text("ab \n", max_size=40), max_size=12), st.integers(4, 60))
def test_documents_hold_all_of_a_text_and_none_is_too_long(paragraphs, most):
    text = "\n\n".join(paragraphs).encode()
    documents = cut_document(text, most)
    assert all(0 < len(document) <= most for document in documents)
    squeezed = [b"".join(part.split()) for part in (text, b"".join(documents))]
    assert squeezed[0] == squeezed[1]


def test_documents_end_at_blank_lines():
    assert cut_document(b"one\n\ntwo\n\nthree\n", 11) == [b"one\n\ntwo\n\n", b"three\n\n"]
    assert cut_document(b"one\n\ntwo\n\n\nthree\n", 99) == [b"one\n\ntwo\n\n", b"three\n\n"]


def write_files(folder, number=20):
    for i in range(number):
        (folder / f"file{i:02}.txt").write_text(f"This is the text of file {i}.\n\n" * (i + 1))


def test_a_corpus_is_a_function_of_the_text(tmp_path):
    write_files(tmp_path)
    (tmp_path / "picture.bin").write_bytes(b"\x00\x01")
    (tmp_path / ".hidden").write_text("not for reading")
    (tmp_path / "empty.txt").write_text("\n")
    one, two = load_corpus(tmp_path, 100), load_corpus(tmp_path, 100)
    assert one == two
    assert one.skipped_files == 2
    assert not any(b"not for reading" in document for document in one.train + one.held_out)
    held_files = {document.split(b".")[0] for document in one.held_out}
    assert held_files
    assert not held_files & {document.split(b".")[0] for document in one.train}
    (tmp_path / "file03.txt").write_text("Changed.")
    assert load_corpus(tmp_path, 100).fingerprint != one.fingerprint


def test_the_last_documents_of_a_single_file_are_held_out(tmp_path):
    (tmp_path / "only.txt").write_text("".join(f"paragraph {i}\n\n" for i in range(40)))
    corpus = load_corpus(tmp_path, 16)
    assert corpus.held_out == [b"paragraph 38\n\n", b"paragraph 39\n\n"]
    assert len(corpus.train) == 38


def test_the_standard_library_has_text_enough():
    corpus = load_corpus(None, 1024)
    assert corpus.bytes_total > 2_000_000
    assert len({len(document) for document in corpus.train}) > 100


def test_folders_without_text_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist, takes a folder"):
        load_corpus(tmp_path / "nothing", 100)
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(DataError, match="is not a folder, takes a folder"):
        load_corpus(tmp_path / "one.txt", 100)
    with pytest.raises(DataError, match="holds 1 document, takes two or more"):
        load_corpus(tmp_path, 100)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "picture").write_bytes(b"\x00")
    with pytest.raises(DataError, match=r"no text in .* \(1 files skipped"):
        load_corpus(empty, 100)


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6), st.integers(0, 10))
def test_a_pack_predicts_every_byte_of_its_documents(documents, padding):
    used = sum(map(len, documents))
    pack = make_pack(documents, used + padding)
    offsets = pack.cu_seqlens.tolist()
    assert offsets == [0, *torch.tensor([len(d) for d in documents]).cumsum(0).tolist()]
    assert pack.used == used
    assert pack.inputs.shape == (1, used + padding)
    for document, begin, end in zip(documents, offsets, offsets[1:]):
        assert bytes(pack.targets[0, begin:end].tolist()) == document
        assert pack.inputs[0, begin:end].tolist() == [START, *document[:-1]]
        assert pack.position[begin:end].tolist() == list(range(len(document)))


def test_documents_that_do_not_fit_a_pack_are_refused():
    with pytest.raises(ValueError, match="documents: got 5 bytes, takes at most the capacity, 4"):
        make_pack([b"abc", b"de"], 4)


def test_the_schedule_reads_every_document_once_a_pass(tmp_path):
    write_files(tmp_path)
    corpus = load_corpus(tmp_path, 100)
    packs = schedule(corpus, 8, 256, seed=3)
    assert packs == schedule(corpus, 8, 256, seed=3)
    assert packs != schedule(corpus, 8, 256, seed=4)
    assert packs[:5] == schedule(corpus, 5, 256, seed=3)
    assert all(0 < sum(map(len, pack)) <= 256 for pack in packs)
    seen = [document for pack in schedule(corpus, 400, 256, seed=0) for document in pack]
    # A first-fit pack may take one document of the 32 waiting before another, never lose or repeat one.
    counts = [seen.count(document) / corpus.train.count(document) for document in set(corpus.train)]
    passes = len(seen) / len(corpus.train)
    assert passes > 3
    assert all(abs(count - passes) <= 2 for count in counts)
