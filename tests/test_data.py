"""Files to documents, documents to blocks, blocks to groups, groups to batches."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from torch.utils.data import DataLoader
from word_models import word_tokenizer

from superpose.data.blocks import Block, BlockTable, pack
from superpose.data.corpus import find_files, read_documents
from superpose.data.datamodule import StreamsDataModule, TrainingBatches, batched
from superpose.data.groups import EpochGroups, assign_groups
from superpose.data.sources import LocalText, Stories
from superpose.data.streaming import StreamedText

SHARED = {"length": 4, "packing": "concat", "batch_size": 2}


def words(numbers) -> str:
    return "".join(f" w{number}" for number in numbers)


@pytest.fixture
def corpus_folder(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo two\nthree\n", encoding="utf-8")
    rows = [{"text": "four", "id": 1}, {"text": "five", "id": 2}]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    (tmp_path / "deep").mkdir()
    parquet.write_table(pa.table({"text": ["six", "seven"]}), tmp_path / "deep" / "c.parquet")
    (tmp_path / "ignored.md").write_text("no", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", ["one\n\ntwo two\nthree\n"]),
        ("paragraph", ["one", "two two\nthree\n"]),
        ("line", ["one", "two two", "three"]),
    ],
)
def test_documents_of_a_folder(corpus_folder, sample_by, expected):
    documents = list(read_documents(str(corpus_folder), sample_by=sample_by))
    assert documents == [*expected, "four", "five", "six", "seven"]


def test_globs_and_single_files(corpus_folder):
    assert [file.name for file in find_files(f"{corpus_folder}/*.jsonl")] == ["b.jsonl"]
    assert [file.name for file in find_files(f"{corpus_folder}/a.txt")] == ["a.txt"]


def test_bad_files_are_named(corpus_folder):
    with pytest.raises(ValueError, match=r"data.path=nothing/\*.txt matches no"):
        find_files("nothing/*.txt")
    with pytest.raises(ValueError, match="data.sample_by must be one of"):
        list(read_documents(str(corpus_folder), sample_by="word"))
    latin = corpus_folder / "latin.txt"
    latin.write_bytes("caf\xe9".encode("latin1"))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 \(byte 3 is 0xe9\)"):
        list(read_documents(str(latin)))
    latin.write_bytes(b"")
    with pytest.raises(ValueError, match=r"latin.txt is empty"):
        list(read_documents(str(latin)))
    latin.write_text(" \n", encoding="utf-8")
    with pytest.raises(ValueError, match="only white space"):
        list(read_documents(str(latin)))
    lines = corpus_folder / "b.jsonl"
    lines.write_text('{"text": "fine"}\n{"body": "?"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"b.jsonl, line 2 has no text in 'text'"):
        list(read_documents(str(lines)))
    lines.write_text("{\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"b.jsonl, line 1 is no JSON"):
        list(read_documents(str(lines)))
    table = corpus_folder / "deep" / "c.parquet"
    with pytest.raises(ValueError, match="has no column 'body' but text"):
        list(read_documents(str(table), text_column="body"))
    table.write_bytes(b"PAR1 but not really")
    with pytest.raises(ValueError, match=r"c.parquet is no parquet file"):
        list(read_documents(str(table)))


def test_concat_packing_loses_only_the_last_rest():
    tokenizer = word_tokenizer()
    end = tokenizer.eos_token_id
    documents = [words([1, 2, 3]), words([4]), words(range(10, 20))]
    blocks = list(pack(documents, tokenizer, 4, "concat"))
    joined = np.concatenate([block.ids for block in blocks]).tolist()
    assert joined == [1, 2, 3, end, 4, end, *range(10, 20), end][:16]
    assert [block.document for block in blocks] == [0, 1, 2, 2]


def test_document_packing_truncates_and_ends():
    tokenizer = word_tokenizer()
    blocks = list(pack([words([1, 2]), words(range(10))], tokenizer, 4, "document"))
    assert [block.ids.tolist() for block in blocks] == [
        [1, 2, tokenizer.eos_token_id],
        [0, 1, 2, 3],
    ]
    (block,) = pack([words([1, 2]), words(range(10))], tokenizer, 4, "document", min_length=3)
    assert block.ids.tolist() == [0, 1, 2, 3]
    table = BlockTable.from_blocks(blocks, 4, pad_id=59)
    assert table.ids.tolist() == [[1, 2, 60, 59], [0, 1, 2, 3]]
    assert table.lengths.tolist() == [3, 4]


def test_bos_begins_every_block_where_the_tokenizer_adds_it():
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer()
    tokenizer.bos_token = "<end>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 60)]
    )
    blocks = list(pack([words(range(20))], tokenizer, 4, "concat"))
    assert len(blocks) == 7
    assert all(block.ids[0] == 60 and 60 not in block.ids[1:3] for block in blocks)


@pytest.mark.parametrize(("length", "packing"), [(1, "concat"), (4, "rows")])
def test_impossible_blocks(length, packing):
    with pytest.raises(ValueError, match=r"data.(length|packing) must be"):
        list(pack(["a"], word_tokenizer(), length, packing))


def table_of(blocks_per_document: list[int], length: int = 2) -> BlockTable:
    numbers = itertools.count()
    return BlockTable.from_blocks(
        (
            Block(np.full(length, next(numbers), dtype=np.int32), document)
            for document, count in enumerate(blocks_per_document)
            for _ in range(count)
        ),
        length,
        pad_id=0,
    )


@pytest.mark.parametrize("num_streams", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "sizes", [[5, 5, 5, 5, 5, 5, 5, 5], [1] * 40, [12, 9, 3, 8, 4, 4, 7, 2, 11]]
)
def test_groups_use_every_block_once_and_part_documents(num_streams, sizes):
    documents = table_of(sizes).documents
    groups = assign_groups(documents, num_streams, torch.Generator().manual_seed(3))
    used = groups.flatten().tolist()
    assert len(used) == len(set(used)) == len(documents) // num_streams * num_streams
    if max(sizes) <= len(groups):
        of_group = documents[groups].sort(dim=1).values
        assert (of_group[:, 1:] != of_group[:, :-1]).all()


def test_epochs_regroup_and_repeat_by_seed():
    table = table_of([4, 4, 4, 4])
    groups = EpochGroups(table, 2, seed=0)
    assert len(groups) == 8
    epochs = [
        [tuple(groups[epoch * 8 + k].input_ids[:, 0].tolist()) for k in range(8)]
        for epoch in range(2)
    ]
    assert sorted(sum(epochs[0], ())) == sorted(sum(epochs[1], ())) == list(range(16))
    assert epochs[0] != epochs[1]
    again = EpochGroups(table, 2, seed=0)
    assert torch.equal(again[13].input_ids, groups[13].input_ids)  # reached at once
    other = EpochGroups(table, 2, seed=1)
    assert any(not torch.equal(other[k].input_ids, groups[k].input_ids) for k in range(8))


def test_fewer_blocks_than_streams():
    with pytest.raises(
        ValueError, match=r"gives 3 blocks of 2 tokens, fewer than the 4 texts of a group"
    ):
        EpochGroups(table_of([3]), 4, seed=0)


def test_blocks_of_one_document_are_warned_of(caplog):
    EpochGroups(table_of([9, 1]), 2, seed=0)
    assert "4 of 5 groups hold two blocks of one document" in caplog.text
    caplog.clear()
    EpochGroups(table_of([5, 5]), 2, seed=0)
    assert caplog.text == ""


def test_hold_out_takes_tails_and_every_nth_short_document():
    training, held_out = table_of([10, 10, 5]).hold_out(0.2)
    assert held_out.ids[:, 0].tolist() == [8, 9, 18, 19, 24]
    assert len(training) == 20
    training, held_out = table_of([1] * 20).hold_out(0.2)
    assert held_out.documents.tolist() == [4, 9, 14, 19]
    training, held_out = table_of([3, 3]).hold_out(1.0)
    assert (len(training), len(held_out)) == (0, 6)
    with pytest.raises(ValueError, match=r"data.validation_fraction must lie above 0"):
        table_of([3]).hold_out(0.0)


def local_text(tmp_path, **settings) -> LocalText:
    for document in range(4):
        text = words(range(document * 12, document * 12 + 12)) * 5
        (tmp_path / f"{document}.txt").write_text(text, encoding="utf-8")
    return LocalText(f"{tmp_path}/*.txt", validation_fraction=0.2, **{**SHARED, **settings})


def test_training_and_held_out_are_disjoint(tmp_path):
    source, tokenizer = local_text(tmp_path), word_tokenizer()
    training, held_out = source._split(tokenizer)
    assert len(training) + len(held_out) == 61  # 4 documents of 61 tokens, in blocks of 4
    assert len(held_out) == 12
    groups = list(source.held_out_groups(tokenizer, 2, "validation"))
    assert len(groups) == 6


def first_batches(dataset, count: int, num_workers: int = 0) -> list[list]:
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    return [
        [batch.input_ids.tolist(), batch.weights.tolist()]
        for batch in itertools.islice(loader, count)
    ]


def training_batches(source, **settings) -> TrainingBatches:
    groups = source.training_groups(word_tokenizer(), 2, 0)
    return TrainingBatches(groups, 2, 2, "dirichlet", 0.25, 0, **settings)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_go_on_where_a_run_stopped(tmp_path, num_workers):
    source = local_text(tmp_path)
    straight = first_batches(training_batches(source), 40)  # more than one epoch
    assert first_batches(training_batches(source), 40, num_workers) == straight
    resumed = first_batches(training_batches(source, first_batch=15), 25, num_workers)
    assert resumed == straight[15:]


def test_ranks_share_one_sequence_of_groups(tmp_path):
    source = local_text(tmp_path)
    alone = TrainingBatches(source.training_groups(word_tokenizer(), 2, 0), 4, 2, "uniform", 0.0, 0)
    ranks = [
        TrainingBatches(
            source.training_groups(word_tokenizer(), 2, 0), 2, 2, "uniform", 0.0, 0, rank, 2
        )
        for rank in range(2)
    ]
    for whole, *parts in zip(
        itertools.islice(alone, 10), *(itertools.islice(rank, 10) for rank in ranks), strict=True
    ):
        assert torch.equal(whole.input_ids, torch.cat([part.input_ids for part in parts]))


def test_validation_is_the_same_for_every_seed(tmp_path):
    modules = [
        StreamsDataModule(local_text(tmp_path), word_tokenizer(), 2, seed=seed) for seed in (0, 1)
    ]
    first, second = ([b.input_ids for b in m.val_dataloader()] for m in modules)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all((batch.weights == 0.5).all() for batch in modules[0].val_dataloader())


def test_last_batch_may_be_smaller():
    groups = [EpochGroups(table_of([4, 4]), 2, seed=0)[k] for k in range(3)]
    assert [batch.num_rows for batch in batched(groups, 2)] == [2, 1]


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_story_groups_are_functions_of_their_number(packing):
    from superpose.models.loading import load

    source = Stories(length=64, packing=packing, batch_size=2)
    tokenizer = load("tiny", random_init=True).tokenizer
    groups = source.training_groups(tokenizer, 2, 0)
    assert torch.equal(groups[5].input_ids, groups[5].input_ids)
    assert not torch.equal(groups[5].input_ids, groups[6].input_ids)
    lengths = groups[5].attention_mask.sum(dim=1).tolist()
    assert all(length == 64 if packing == "concat" else 20 < length < 64 for length in lengths)
    texts = tokenizer.batch_decode(groups[5].input_ids, skip_special_tokens=True)
    assert len(set(texts)) == 2


@pytest.fixture
def streamed_files(tmp_path):
    for part in range(2):
        texts = [words(range(k, k + 9)) for k in range(part * 20, part * 20 + 20)]
        parquet.write_table(pa.table({"text": texts}), tmp_path / f"{part}.parquet")
    return f"{tmp_path}/*.parquet"


def streamed(path: str, **settings) -> StreamedText:
    shared = {**SHARED, "packing": "document", "length": 8}
    return StreamedText(path, validation_documents=4, shuffle_buffer=10, **shared, **settings)


def starts(groups) -> list[tuple[int, ...]]:
    return [tuple(group.input_ids[:, 0].tolist()) for group in groups]


def test_streamed_groups_are_endless_seeded_and_held_out(streamed_files):
    source, tokenizer = streamed(streamed_files), word_tokenizer()
    held_out = starts(source.held_out_groups(tokenizer, 2, "validation"))
    assert sorted(sum(held_out, ())) == [0, 1, 2, 3]
    first, again = (
        starts(itertools.islice(source.training_groups(tokenizer, 2, 0).shard(0, 1), 60))
        for _ in range(2)
    )
    assert first == again
    assert {start for group in first for start in group} == set(range(4, 40))
    assert all(a != b for a, b in first)
    other = starts(itertools.islice(source.training_groups(tokenizer, 2, 1).shard(0, 1), 60))
    assert other != first


def test_streamed_ranks_read_different_rows(streamed_files):
    source, tokenizer = streamed(streamed_files), word_tokenizer()
    seen = [
        {
            s
            for g in starts(itertools.islice(source.stream_groups(tokenizer, 2, 0, r, 2), 40))
            for s in g
        }
        for r in range(2)
    ]
    assert seen[0].isdisjoint(seen[1])
    assert seen[0] | seen[1] == set(range(4, 40))


def test_streamed_batches_resume(streamed_files):
    source = streamed(streamed_files)
    straight = first_batches(training_batches(source), 12)
    assert first_batches(training_batches(source, first_batch=5), 7) == straight[5:]


def test_streamed_mistakes(streamed_files, monkeypatch):
    source = streamed(streamed_files, text_column="body")
    with pytest.raises(ValueError, match="has no column 'body' but text"):
        next(source.held_out_groups(word_tokenizer(), 2, "validation"))
    with pytest.raises(ValueError, match="must be 0 or 1 for streamed data"):
        streamed(streamed_files, num_workers=2)
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *a, **k: (_ for _ in ()).throw(OSError("no"))
    )
    with pytest.raises(ValueError, match=r"could not be opened .* data=stories"):
        next(streamed("nobody/nothing").held_out_groups(word_tokenizer(), 2, "validation"))


def test_source_settings_name_their_key():
    with pytest.raises(ValueError, match=r"data.batch_size must be at least 1, got 0"):
        Stories(length=64, packing="document", batch_size=0)
