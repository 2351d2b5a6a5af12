"""Local text to Megatron indexed datasets, split by file into training and held-out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np
from tqdm import tqdm

from nemo_hsmoe.data.tokenizer import Llama3BPE
from nemo_hsmoe.runtime.errors import ConfigurationError, require

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
_MANIFEST = "manifest.json"
_FORMAT_VERSION = 1
_HASH_RANGE = 1 << 32
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class CorpusSplit:
    """One half of a tokenised corpus: `prefix` names its `.bin` and `.idx` files."""

    prefix: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus on disk.

    Attributes:
        train, held_out: the two halves; a file is wholly in one.
        skipped: files left out, with the reason.
        fingerprint: hash of the paths and contents of everything read.
    """

    train: CorpusSplit
    held_out: CorpusSplit
    skipped: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""


def standard_library_files() -> list[Path]:
    """The Python standard library's modules, tests and installed packages excepted, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "ensurepip"}
    return sorted(path for path in root.rglob("*.py") if not left_out.intersection(path.relative_to(root).parts))


def text_files(paths: Sequence[str | os.PathLike]) -> list[Path]:
    """Every file named in `paths`, and below every folder named the files with one of `TEXT_SUFFIXES`, sorted.

    Raises:
        ConfigurationError: when a path does not exist or nothing is found.
    """
    files: set[Path] = set()
    for entry in map(Path, paths):
        require(entry.exists(), "corpus", str(entry), "needs an existing file or folder")
        if entry.is_dir():
            files.update(path for path in entry.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file())
        else:
            files.add(entry)
    require(bool(files), "corpus", [str(path) for path in paths], f"needs files ending in {', '.join(TEXT_SUFFIXES)}")
    return sorted(files)


def build_corpus(
    cache_dir: str | os.PathLike,
    paths: Optional[Sequence[str | os.PathLike]] = None,
    held_out_fraction: float = 0.05,
    progress: bool = True,
) -> Corpus:
    """Tokenise text files into two indexed datasets below `cache_dir`, or find them there from before.

    Each document is `<|begin_of_text|> … <|end_of_text|>`. A `.jsonl` file holds a document a line under `text`; any
    other file is one document. The split goes by a hash of the file's path below the deepest folder all files share, so
    it is the same on every machine, and at least one file is held out. Unreadable, non-UTF-8 and empty files are skipped
    and counted. A build is complete or absent: it is made aside and renamed.

    Args:
        cache_dir: folder for tokenised corpora; each goes to a subfolder named by its fingerprint.
        paths: files and folders; None takes the Python standard library.
        held_out_fraction: share of files held out, in (0, 1).
        progress: show a progress bar.

    Raises:
        ConfigurationError: when no text is left, one half would be empty, or `cache_dir` cannot be written.
    """
    require(0 < held_out_fraction < 1, "held_out_fraction", held_out_fraction, "needs a number between 0 and 1")
    files = standard_library_files() if paths is None else text_files(paths)
    texts, skipped = _read_all(files)
    require(
        len(texts) > 1,
        "corpus",
        [str(path) for path in paths] if paths else str(sysconfig.get_path("stdlib")),
        f"needs at least two readable, non-empty UTF-8 text files, one to hold out; found {len(texts)}, "
        f"skipped {len(skipped)}{_first_reason(skipped)}",
    )
    held_out = _held_out_names(texts, held_out_fraction)
    fingerprint = _fingerprint(texts, held_out_fraction)
    folder = Path(cache_dir).expanduser() / fingerprint[:16]
    if (folder / _MANIFEST).exists():
        return load_corpus(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    except OSError as error:
        raise ConfigurationError("cache_dir", str(cache_dir), f"needs a folder that can be written: {error}") from None
    try:
        train_texts = {name: text for name, text in texts.items() if name not in held_out}
        held_out_texts = {name: text for name, text in texts.items() if name in held_out}
        total = sum(map(len, texts.values()))
        with tqdm(total=total, unit="char", unit_scale=True, desc="Tokenising", disable=not progress) as bar:
            train = _write_split(workspace / "train", train_texts, bar)
            other = _write_split(workspace / "held_out", held_out_texts, bar)
        manifest = Corpus(train, other, skipped, fingerprint)
        (workspace / _MANIFEST).write_text(json.dumps({"version": _FORMAT_VERSION, **asdict(manifest)}, indent=1))
        _rename_unless_present(workspace, folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return load_corpus(folder)


def load_corpus(folder: str | os.PathLike) -> Corpus:
    """Read a corpus that `build_corpus` wrote.

    Raises:
        ConfigurationError: when the folder holds none, or one of another format version.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError("corpus", str(folder), f"needs a folder written by build_corpus: {error}") from None
    version = manifest.pop("version", None)
    require(version == _FORMAT_VERSION, "corpus", str(folder), f"needs format version {_FORMAT_VERSION}, has {version}")

    def split(half: str) -> CorpusSplit:
        entry = manifest[half]
        binary = folder / f"{Path(entry['prefix']).name}.bin"
        size, expected = binary.stat().st_size if binary.exists() else 0, entry["tokens"] * _BYTES_PER_TOKEN
        reason = f"needs {expected} bytes, has {size}: remove the folder to tokenise again"
        require(size == expected, "corpus", str(binary), reason)
        return CorpusSplit(str(folder / Path(entry["prefix"]).name), entry["documents"], entry["tokens"])

    return Corpus(split("train"), split("held_out"), manifest["skipped"], manifest["fingerprint"])


def _read_all(files: Iterable[Path]) -> tuple[dict[str, str], dict[str, str]]:
    files = list(files)
    root = Path(os.path.commonpath([path.resolve().parent for path in files]))
    texts, skipped = {}, {}
    for path in files:
        name = path.resolve().relative_to(root).as_posix()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            skipped[name] = "not UTF-8"
        except OSError as error:
            skipped[name] = error.strerror or type(error).__name__
        else:
            if text.strip():
                texts[name] = text
            else:
                skipped[name] = "empty"
    return texts, skipped


def _first_reason(skipped: dict[str, str]) -> str:
    return "".join(f" (first: {name}, {reason})" for name, reason in list(skipped.items())[:1])


def _position(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def _held_out_names(texts: dict[str, str], fraction: float) -> set[str]:
    by_position = sorted(texts, key=_position)
    chosen = {name for name in by_position if _position(name) < fraction * _HASH_RANGE}
    chosen = chosen or set(by_position[:1])
    return chosen if len(chosen) < len(texts) else chosen - {by_position[-1]}


def _fingerprint(texts: dict[str, str], fraction: float) -> str:
    digest = hashlib.blake2b(f"{_FORMAT_VERSION}:{fraction}".encode(), digest_size=16)
    for name, text in sorted(texts.items()):
        digest.update(f"\0{name}\0".encode())
        digest.update(text.encode())
    return digest.hexdigest()


def _documents(name: str, text: str) -> Iterator[str]:
    if not name.endswith(".jsonl"):
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError("corpus", f"{name}, line {number}", 'needs a JSON object with "text"') from None
        require(isinstance(document, str), "corpus", f"{name}, line {number}", 'needs "text" to be a string')
        if document:
            yield document


def _write_split(prefix: Path, texts: dict[str, str], bar: tqdm) -> CorpusSplit:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokenizer = Llama3BPE()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    documents = tokens = 0
    for name, text in sorted(texts.items()):
        for document in _documents(name, text):
            ids = tokenizer.encode_document(document)
            builder.add_document(torch.tensor(ids, dtype=torch.int32), [len(ids)])
            documents, tokens = documents + 1, tokens + len(ids)
        bar.update(len(text))
    builder.finalize(f"{prefix}.idx")
    return CorpusSplit(prefix.name, documents, tokens)


def _rename_unless_present(workspace: Path, folder: Path) -> None:
    try:
        workspace.rename(folder)
    except OSError:
        if not (folder / _MANIFEST).exists():
            raise
