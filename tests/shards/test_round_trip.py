import json
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.shards.format import ShardLayout, bytes_of_empty_part, read_header
from eagle3_pipeline.shards.listing import JOURNAL_NAME
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.shards.writer import ShardWriter
from tests.shards.build import LAYOUT, invent, make_shard, same


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=12),
    part_bytes=st.integers(1, 12_000),
    ids=st.lists(st.text(min_size=1, max_size=20), min_size=12, max_size=12, unique=True),
)
def test_any_lengths_in_parts_of_any_size_come_back_exactly(
    lengths: list[int], part_bytes: int, ids: list[str]
) -> None:
    samples = [invent(tokens, seed) for seed, tokens in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as temporary:
        folder, manifest = make_shard(Path(temporary), [])
        assert ShardReader([folder]).lengths == []
        (folder / "manifest.json").unlink()
        with ShardWriter(folder, LAYOUT, part_bytes, manifest.fingerprint) as writer:
            for sample_id, sample in zip(ids, samples, strict=False):
                writer.add(sample_id, **sample)
            parts = writer.complete()
            for part in parts:
                header = read_header(part)
                assert part.stat().st_size <= part_bytes or len(header.sample_ids) == 1
        folder, _ = make_shard(Path(temporary), samples, part_bytes, "p4-s001")
        reader = ShardReader([folder])
        assert reader.lengths == lengths
        for index in reversed(range(len(samples))):
            assert same(reader[index], samples[index])
        assert [header for part in parts for header in read_header(part).sample_ids] == ids[: len(lengths)]


def test_several_shards_read_as_one_list_at_random_and_from_another_process(tmp_path: Path) -> None:
    first, second = ([invent(tokens, 10 * tokens) for tokens in lengths] for lengths in ([3, 5, 2], [7, 1]))
    folders = [
        make_shard(tmp_path, first, 1, "p4-s000")[0],
        make_shard(tmp_path, second, 1 << 20, "p4-s001")[0],
    ]
    reader = pickle.loads(pickle.dumps(ShardReader(folders)))
    assert len(reader) == 5
    assert reader.lengths == [3, 5, 2, 7, 1]
    assert reader.sample_ids == ["p4-s000-0", "p4-s000-1", "p4-s000-2", "p4-s001-0", "p4-s001-1"]
    assert reader.layout == LAYOUT
    for index in (4, 0, 2, -2, 1):
        assert same(reader[index], [*first, *second][index])
    with pytest.raises(IndexError):
        reader[5]


def test_a_part_is_an_ordinary_safetensors_file_whose_header_says_what_it_is(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0), invent(4, 1)])
    with safe_open(folder / "part-00000.safetensors", framework="pt") as file:
        said = file.metadata()
        assert said["format_version"] == "2"
        assert (said["layer_ids"], said["layer_convention"]) == ("[2, 5, 8]", "input-of-layer")
        assert (said["pre_norm_last"], said["dtype"]) == ("true", "bfloat16")
        assert json.loads(said["sample_ids"]) == ["p4-s000-0", "p4-s000-1"]
        assert said["model_fingerprint"] == "m" * 64
        assert file.get_tensor("offsets").tolist() == [0, 3, 7]
        assert file.get_slice("hidden_states").get_shape() == [7, 3, 4]


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_a_part_that_is_cut_or_grown_is_damaged_whether_the_manifest_is_asked_or_not(
    tmp_path: Path, cut: int
) -> None:
    folder, _ = make_shard(tmp_path, [invent(600, 0)])
    part = folder / "part-00000.safetensors"
    data = part.read_bytes()
    for broken in (data[:-cut], data[: cut - 1], data + b"x"):
        part.write_bytes(broken)
        with pytest.raises(DamagedFile, match="the manifest says"):
            ShardReader([folder])
        with pytest.raises(DamagedFile, match="part-00000"):
            read_header(part)
    part.unlink()
    with pytest.raises(DamagedFile, match="missing"):
        ShardReader([folder])


def test_a_header_of_another_format_version_or_convention_is_refused(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(6, 0)])
    part = folder / "part-00000.safetensors"
    data = part.read_bytes()
    for found, other in (
        (b'"format_version":"2"', b'"format_version":"9"'),
        (b"input-of-layer", b"outputoflayers"),
    ):
        part.write_bytes(data.replace(found, other))
        with pytest.raises(DamagedFile, match="expected"):
            ShardReader([folder])


@pytest.mark.parametrize(
    "other", [ShardLayout(LAYOUT.layer_ids, 4, "o" * 64), ShardLayout((1, 5, 8), 4, "m" * 64)]
)
def test_shards_of_different_models_or_layers_are_not_read_together(
    tmp_path: Path, other: ShardLayout
) -> None:
    folders = [
        make_shard(tmp_path, [invent(3, 0)])[0],
        make_shard(tmp_path, [invent(3, 0)], shard="p4-s001", layout=other)[0],
    ]
    with pytest.raises(DamagedFile, match="one target and the same layers"):
        ShardReader(folders)


def test_a_shard_without_a_manifest_is_not_there(tmp_path: Path) -> None:
    folder, _ = make_shard(tmp_path, [invent(3, 0)])
    (folder / "manifest.json").unlink()
    with pytest.raises(MissingInput, match="not complete"):
        ShardReader([folder])


def test_the_journal_goes_when_the_manifest_stands(tmp_path: Path) -> None:
    folder, manifest = make_shard(tmp_path, [invent(3, 0)])
    assert not (folder / JOURNAL_NAME).exists()
    assert [entry.path for entry in manifest.files] == ["part-00000.safetensors"]


def test_samples_that_do_not_fit_the_layout_are_a_bug_of_the_caller(tmp_path: Path) -> None:
    good = invent(3, 0)
    with ShardWriter(tmp_path, LAYOUT, 1 << 20, "f" * 64) as writer:
        for changes in (
            {"hidden_states": good["hidden_states"][:2]},
            {"hidden_states": good["hidden_states"].float()},
            {"loss_mask": torch.ones(2)},
            {name: tensor[:0] for name, tensor in good.items()},
        ):
            with pytest.raises(ValueError, match="x: "):
                writer.add("x", **(good | changes))
        assert writer.complete() == []


def test_the_bound_of_an_empty_part_covers_its_header(tmp_path: Path) -> None:
    layout = ShardLayout(tuple(range(1, 200)), 1, "m" * 64)
    with ShardWriter(tmp_path, layout, 1, "f" * 64) as writer:
        writer.add("a", **invent(1, 0, layout))
        (part,) = writer.complete()
    assert part.stat().st_size < bytes_of_empty_part(layout) + layout.bytes_per_token + 8 + 16
