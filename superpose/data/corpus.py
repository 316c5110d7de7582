"""Text files to documents: .txt, .jsonl and .parquet, one file, a folder or a glob."""

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".txt", ".jsonl", ".parquet")
SAMPLE_BY = ("document", "paragraph", "line")


def find_files(path: str) -> list[Path]:
    """The text files that ``data.path`` names, sorted.

    Args:
        path: a file, a folder (searched to the bottom) or a glob (``books/*.txt``).

    Raises:
        ValueError: if nothing readable is there.
    """
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        candidates = [Path(name) for name in glob.glob(f"{expanded}/**/*", recursive=True)]
    else:
        candidates = [Path(name) for name in glob.glob(expanded, recursive=True)]
    files = sorted(file for file in candidates if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise ValueError(
            f"data.path={path} matches no {', '.join(SUFFIXES)} file (seen from {os.getcwd()}); "
            "give a file, a folder or a quoted glob such as 'books/*.txt'"
        )
    return files


def read_documents(
    path: str, text_column: str = "text", sample_by: str = "document"
) -> Iterator[str]:
    """The documents of all files that ``path`` names, file by file.

    Args:
        path: see :func:`find_files`.
        text_column: the column of .jsonl and .parquet rows that holds the text; a row is a document.
        sample_by: what a document of a .txt file is, in the words of ``datasets``: ``document``
            (the whole file), ``paragraph`` (parted by empty lines) or ``line``.

    Raises:
        ValueError: for an empty or non-UTF-8 file, a row without the column, bad JSON.
    """
    if sample_by not in SAMPLE_BY:
        raise ValueError(f"data.sample_by must be one of {', '.join(SAMPLE_BY)}, got {sample_by!r}")
    for file in find_files(path):
        if file.stat().st_size == 0:
            raise ValueError(f"data.path={path}: {file} is empty; remove it or narrow the glob")
        if file.suffix == ".parquet":
            yield from _parquet(file, text_column)
        elif file.suffix == ".jsonl":
            yield from _jsonl(file, text_column)
        else:
            yield from _txt(file, sample_by)


def _txt(file: Path, sample_by: str) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.path: {file} is not UTF-8 (byte {error.start} is {error.object[error.start]:#x});"
            f" convert it, for example with iconv -f latin1 -t utf-8 '{file}'"
        ) from None
    if not text.strip():
        raise ValueError(f"data.path: {file} holds only white space; remove it or narrow the glob")
    if sample_by == "document":
        parts = [text]
    else:
        parts = text.split("\n\n") if sample_by == "paragraph" else text.split("\n")
    yield from (part for part in parts if part.strip())


def _jsonl(file: Path, text_column: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise ValueError(f"data.path: {file}, line {number} is no JSON: {error}") from None
            if not isinstance(row, dict) or not isinstance(row.get(text_column), str):
                raise ValueError(
                    f"data.path: {file}, line {number} has no text in {text_column!r}; "
                    "name the right column with data.text_column"
                )
            yield row[text_column]


def _parquet(file: Path, text_column: str) -> Iterator[str]:
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(file)
    except Exception as error:  # pyarrow has no common base class for broken files
        raise ValueError(f"data.path: {file} is no parquet file: {error}") from None
    if text_column not in table.schema_arrow.names:
        raise ValueError(
            f"data.path: {file} has no column {text_column!r} but "
            f"{', '.join(table.schema_arrow.names)}; name one with data.text_column"
        )
    for batch in table.iter_batches(columns=[text_column]):
        yield from (text for text in batch.column(0).to_pylist() if text)
