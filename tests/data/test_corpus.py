import json

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from nemo_hsmoe.data.corpus import build_corpus, load_corpus, standard_library_files, text_files
from nemo_hsmoe.data.epoch_shuffle import EpochShuffledDataset
from nemo_hsmoe.data.tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, PADDING, Llama3BPE
from nemo_hsmoe.data.unigram import unigram_negative_log_likelihood
from nemo_hsmoe.runtime.errors import ConfigurationError


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"Document {number}. " * 20)
    return folder


def test_tokenizer_is_llama_3():
    tokenizer = Llama3BPE()
    assert tokenizer.encode("hello world") == [15339, 1917]
    assert tokenizer.encode_document("hello world") == [BEGIN_OF_TEXT, 15339, 1917, END_OF_TEXT]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        128_256,
        128_000,
        128_001,
        PADDING,
    )
    assert tokenizer.decode(tokenizer.encode("naïve — 你好\n")) == "naïve — 你好\n"
    assert END_OF_TEXT not in tokenizer.encode("<|end_of_text|>")


def test_documents_survive_the_round_trip_and_the_split_is_by_file(texts, tmp_path):
    corpus = build_corpus(tmp_path / "cache", [texts], progress=False)
    tokenizer = Llama3BPE()
    found = []
    for split in (corpus.train, corpus.held_out):
        dataset = IndexedDataset(split.prefix)
        assert split.documents == len(dataset) > 0
        assert split.tokens == sum(len(dataset[index]) for index in range(len(dataset)))
        for index in range(len(dataset)):
            ids = dataset[index].tolist()
            assert (ids[0], ids[-1]) == (BEGIN_OF_TEXT, END_OF_TEXT)
            found.append(tokenizer.decode(ids[1:-1]))
    assert sorted(found) == sorted(path.read_text() for path in texts.iterdir())


def test_a_second_build_finds_the_first_and_another_place_splits_alike(texts, tmp_path):
    first = build_corpus(tmp_path / "a", [texts], progress=False)
    assert build_corpus(tmp_path / "a", [texts], progress=False) == first
    second = build_corpus(tmp_path / "b", [texts], progress=False)
    assert (second.fingerprint, second.held_out.tokens) == (first.fingerprint, first.held_out.tokens)
    (texts / "0.txt").write_text("changed")
    assert build_corpus(tmp_path / "a", [texts], progress=False).fingerprint != first.fingerprint


def test_unusable_files_are_skipped_and_counted(texts, tmp_path):
    (texts / "latin.txt").write_bytes(b"caf\xe9 " * 5)
    (texts / "empty.txt").write_text(" \n")
    corpus = build_corpus(tmp_path / "cache", [texts], progress=False)
    assert corpus.skipped == {"latin.txt": "not UTF-8", "empty.txt": "empty"}


def test_json_lines_hold_a_document_a_line(texts, tmp_path):
    (texts / "more.jsonl").write_text("\n".join(json.dumps({"text": f"line {number}"}) for number in range(3)))
    corpus = build_corpus(tmp_path / "cache", [texts], progress=False)
    assert corpus.train.documents + corpus.held_out.documents == 9
    (texts / "bad.jsonl").write_text('{"content": 1}')
    with pytest.raises(ConfigurationError, match=r'bad.jsonl, line 1.*needs a JSON object with "text"'):
        build_corpus(tmp_path / "cache", [texts], progress=False)
    assert not list((tmp_path / "cache").glob("building-*"))


@pytest.mark.parametrize("content", [[], [b"\xff\xfe"], [b""], [b"one usable file"]])
def test_a_corpus_with_nothing_left_is_refused(tmp_path, content):
    folder = tmp_path / "few"
    folder.mkdir()
    for number, data in enumerate(content):
        (folder / f"{number}.txt").write_bytes(data)
    with pytest.raises(ConfigurationError) as error:
        build_corpus(tmp_path / "cache", [folder], progress=False)
    assert "corpus=" in str(error.value)
    assert "needs" in str(error.value)


def test_missing_path_and_unwritable_cache(texts, tmp_path):
    with pytest.raises(ConfigurationError, match="needs an existing file or folder"):
        text_files([tmp_path / "nowhere"])
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationError, match=r"cache_dir=.*needs a folder that can be written"):
        build_corpus(blocked / "below", [texts], progress=False)
    with pytest.raises(ConfigurationError, match="needs a folder written by build_corpus"):
        load_corpus(texts)


def test_default_corpus_is_the_standard_library():
    names = {path.name for path in standard_library_files()}
    assert {"argparse.py", "datetime.py", "typing.py"} <= names
    assert not any("site-packages" in path.parts or "test" in path.parts for path in standard_library_files())


def test_unigram_is_add_one_smoothing(texts, tmp_path):
    corpus = build_corpus(tmp_path / "cache", [texts], progress=False)
    nll = unigram_negative_log_likelihood(corpus.train.prefix)
    dataset = IndexedDataset(corpus.train.prefix)
    tokens = np.concatenate([dataset[index] for index in range(len(dataset))])
    count = int((tokens == BEGIN_OF_TEXT).sum())
    assert float(nll[BEGIN_OF_TEXT]) == pytest.approx(-np.log((count + 1) / (len(tokens) + 128_256)), rel=1e-6)
    assert float(torch.exp(-nll.double()).sum()) == pytest.approx(1.0, rel=1e-5)


def test_sample_order_depends_on_seed_and_epoch_but_not_on_the_length_of_the_run():
    items = list(range(10))
    short, long = EpochShuffledDataset(items, 15, seed=3), EpochShuffledDataset(items, 40, seed=3)
    order = [long[index] for index in range(40)]
    assert [short[index] for index in range(15)] == order[:15]
    assert all(sorted(order[start : start + 10]) == items for start in range(0, 40, 10))
    assert order[:10] != order[10:20]
    assert [long[index] for index in (35, 5, 35)] == [order[35], order[5], order[35]]
    assert [EpochShuffledDataset(items, 10, seed=4)[index] for index in range(10)] != order[:10]
